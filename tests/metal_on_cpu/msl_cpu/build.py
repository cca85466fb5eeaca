"""Compiles translated kernels, and keeps what it made by content."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
INCLUDE = HERE / "include"
ROOT = HERE.parents[2]

# check: accesses are checked by the runtime, undefined arithmetic traps, and local variables begin as nonsense.
_TRAPS = [
    "-fsanitize=bounds,shift,signed-integer-overflow,integer-divide-by-zero,alignment",
    "-fsanitize-undefined-trap-on-error",
]
KERNEL_FLAGS = {
    "fast": ["-O1"],  # -O2 takes longer to compile than it saves
    "check": ["-O1", "-g1", "-fsanitize=thread", *_TRAPS, "-ftrivial-auto-var-init=pattern", "-DMSL_CHECK"],
}
RUNTIME_FLAGS = {"fast": [], "check": ["-DMSL_CHECK"]}
# Literals of MSL are floats, halves are rounded after each operation, and nothing is fused.
_LANGUAGE = ["-fsingle-precision-constant", "-fexcess-precision=16", "-ffp-contract=off", "-fno-strict-aliasing"]


def folder() -> Path:
    """Where builds are kept."""
    found = Path(os.environ.get("TINYKV_METAL_BUILDS") or ROOT / ".tox" / "metal-on-cpu")
    found.mkdir(parents=True, exist_ok=True)
    return found


@functools.cache
def problem() -> str:
    """Why kernels can't be run here; empty if they can."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        return "Metal kernels are run on Linux on x86-64 and arm64"
    if compiler() is None:
        return "no g++ 12 or newer (Metal kernels are compiled as C++)"
    return ""


@functools.cache
def compiler() -> str | None:
    """GCC 12 or newer, which has ``_Float16``."""
    for name in (os.environ.get("CXX", ""), "g++", "g++-12", "g++-13", "g++-14"):
        path = shutil.which(name) if name else None
        if path is None:
            continue
        done = subprocess.run([path, "-dumpfullversion"], capture_output=True, text=True, check=False)
        version = re.match(r"(\d+)\.", done.stdout)
        clang = "clang" in subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
        if version and int(version.group(1)) >= 12 and not clang:
            return path
    return None


@functools.cache
def _processor() -> str:
    """What ``-march=native`` depends on."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    found = re.search(r"^(flags|Features)\s*:.*$", text, re.MULTILINE)
    return found.group(0) if found else ""


@functools.cache
def _headers() -> str:
    """What every build depends on: the shim, and how it is compiled."""
    return Path(__file__).read_text(encoding="utf-8") + "".join(
        file.read_text(encoding="utf-8") for file in sorted(INCLUDE.rglob("*")) if file.is_file()
    )


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:20]


def _run(command: Sequence[object]) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr[:6000]}")


def _compiled(target: Path, command: Sequence[object]) -> Path:
    """Runs ``command`` with its output at ``target``, whole or not at all: other processes may do the same."""
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
            made = Path(temporary) / target.name
            _run([*command, "-o", made])
            made.replace(target)
    return target


def _base_flags() -> list[str]:
    return ["-std=gnu++17", "-fPIC", "-w", "-march=native", f"-I{INCLUDE}"]


@functools.cache
def _runtime(variant: str) -> Path:
    """The library that runs kernels; linking a kernel with it is quick, as nothing of the C++ library is needed."""
    sources = {file: file.read_text(encoding="utf-8") for file in sorted((HERE / "runtime").glob("*"))}
    flags = ["-O2", *_base_flags(), *RUNTIME_FLAGS[variant]]
    key = _digest(*sources.values(), _headers(), compiler(), flags, _processor())
    files = [file for file in sources if file.suffix == ".cpp"]
    return _compiled(folder() / f"runtime-{key}.so", [compiler(), *flags, "-shared", *files])


@functools.cache
def _prelude(text: str, flags: tuple[str, ...], of: str) -> Path:
    """A header with ``text``, compiled once for all kernels: it takes longer than a kernel does."""
    header = folder() / f"prelude-{_digest(text, _headers(), compiler(), flags, _processor(), of)}.h"
    new = header.with_name(f"{header.name}-{os.getpid()}")
    new.write_text(text, encoding="utf-8")
    new.replace(header)
    _compiled(header.with_name(f"{header.name}.gch"), [compiler(), *flags, "-x", "c++-header", header])
    return header


def shared_object(prelude: str, cpp: str, variant: str, includes: Sequence[Path], of: str) -> Path:
    """The compiled translation unit, linked with the runtime.

    ``prelude`` is what comes first and is the same in many; ``of`` says which version the ``includes`` have.
    """
    flags = [*_base_flags(), *_LANGUAGE, *KERNEL_FLAGS[variant], *(f"-I{path}" for path in includes)]
    runtime = _runtime(variant)
    key = _digest(prelude, cpp, _headers(), compiler(), flags, _processor(), of, runtime.name)
    target = folder() / f"kernel-{key}.so"
    if not target.exists():
        source = folder() / f"kernel-{key}-{os.getpid()}.cpp"
        kernel = source.with_suffix(".o")
        source.write_text(cpp, encoding="utf-8")
        try:
            _run([compiler(), *flags, "-include", _prelude(prelude, tuple(flags), of), "-c", source, "-o", kernel])
            # Linked without the compiler's sanitizer flags: the hooks are the runtime's own.
            _compiled(target, [compiler(), "-shared", "-nostdlib", kernel, runtime, "-lm", "-lc", "-lgcc"])
        finally:
            source.unlink()
            kernel.unlink(missing_ok=True)
    return target
