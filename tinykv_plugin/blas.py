"""A fast BLAS under mlx on a Linux CPU.

mlx's Linux CPU wheel is linked to the reference BLAS, some forty times slower than OpenBLAS in float32 matmul. A
library that exports ``cblas_sgemm`` and is loaded globally *before* mlx takes its place, as the dynamic linker looks
there first. So this module imports nothing from mlx, and ``load_blas`` has to run before the first ``import mlx.core``.
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import os
import platform
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .blas_library import describe, global_provider, load_globally, preloaded
from .errors import BlasError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ENVIRONMENT_VARIABLE = "TINYKV_BLAS"
MLX_OWN = "mlx's own"
_MLX_FIRST = "mlx was imported first; import tinykv_plugin.blas and call load_blas() before mlx"
_CUDA_DISTRIBUTIONS = ("mlx-cuda", "mlx-cuda-12", "mlx-cuda-13")

_lock = threading.Lock()
_report: BlasReport | None = None


@dataclass(frozen=True)
class BlasReport:
    """What ``load_blas`` did.

    name: the library that serves mlx's float32 matmul, with its version where it tells one, or "mlx's own".
    path: the library's file; None where mlx's own serves.
    reason: one line, why this one.
    """

    name: str
    path: str | None
    reason: str


@dataclass(frozen=True)
class BlasCheck:
    """What ``verify`` found: the file that comes first for ``cblas_sgemm`` (None: mlx's own), and GFLOP/s."""

    path: str | None
    gflops: float


def system_openblas() -> Iterator[str]:
    """Yields the paths of OpenBLAS as Debian, Fedora, SUSE, Arch and conda install it, threaded builds first.

    Names with "64" are left out on purpose: those take 64-bit integers, and mlx passes 32-bit ones.
    """
    multiarch = f"{platform.machine()}-linux-gnu"
    paths = [f"/usr/lib/{multiarch}/openblas-{kind}/libblas.so.3" for kind in ("pthread", "openmp", "serial")]
    for folder in (f"{sys.prefix}/lib", "/usr/lib64", f"/usr/lib/{multiarch}", "/usr/lib", "/usr/local/lib"):
        paths += [f"{folder}/libopenblas{kind}.so.0" for kind in ("p", "o", "")]
        paths += [f"{folder}/openblas-pthreads/libopenblas.so.0", f"{folder}/libopenblas.so"]
    yield from (path for path in paths if Path(path).is_file())
    found = ctypes.util.find_library("openblas")
    if found is not None:
        yield found


def native_blas() -> Iterator[str]:
    """Yields the BLAS that the package ``tinykv_native`` brings, ``_blas*.so`` beside its ``__init__``, unimported."""
    spec = importlib.util.find_spec("tinykv_native")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield from sorted(str(path) for path in Path(folder).glob("_blas*.so"))


FINDERS: list[Callable[[], Iterator[str]]] = [system_openblas, native_blas]


def candidates() -> Iterator[str]:
    """Yields the library files worth trying, best first, from every finder in ``FINDERS``; later ones only if asked."""
    for finder in FINDERS:
        yield from finder()


def load_blas() -> BlasReport:
    """Loads a fast BLAS for the whole process, once, and says what serves; later calls return the first one's report.

    The environment variable TINYKV_BLAS chooses: unset or "auto" takes the first usable candidate, "off" leaves mlx's
    own, anything else is the path of the one library to load. Modified: the process's global symbols (not undoable).

    Raises BlasError if TINYKV_BLAS names a file that is missing or has no usable ``cblas_sgemm``.
    """
    global _report
    with _lock:
        if _report is None:
            _report = _choose(os.environ.get(ENVIRONMENT_VARIABLE, "").strip())
        return _report


def blas_report() -> BlasReport:
    """Returns the report of ``load_blas`` and loads nothing: before its first call the reason says so."""
    return _report or BlasReport(MLX_OWN, None, "load_blas() has not run")


def hint() -> str:
    """What a program on a Linux CPU could do to be faster, if mlx was imported before ``load_blas``; empty if nothing.

    Imports mlx. Costs some 0.1 ms.
    """
    import mlx.core as mx

    if not sys.platform.startswith("linux") or mx.default_device().type != mx.DeviceType.cpu:
        return ""
    chosen = os.environ.get(ENVIRONMENT_VARIABLE, "").strip().lower() == "off"
    if chosen or (_report is not None and _report.reason != _MLX_FIRST) or global_provider() is not None:
        return ""
    return (
        "mlx was imported before a fast BLAS, so it multiplies matrices slowly: call tinykv_plugin.blas.load_blas() "
        f"before anything imports mlx, or start the program with `tinykv run` ({ENVIRONMENT_VARIABLE}=off: no hint)"
    )


def verify() -> BlasCheck:
    """Imports mlx, measures its float32 matmul on the CPU (512 x 512, the best of four), and asks which file serves."""
    import mlx.core as mx

    size = 512
    left = mx.ones((size, size), dtype=mx.float32)
    mx.eval(left)
    seconds = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        mx.eval(mx.matmul(left, left, stream=mx.cpu))
        seconds = min(seconds, time.perf_counter() - start)
    return BlasCheck(global_provider(), 2 * size**3 / seconds / 1e9)


def _choose(wanted: str) -> BlasReport:
    """Decides what serves for this value of TINYKV_BLAS, and loads it."""
    if not sys.platform.startswith("linux"):
        return BlasReport(MLX_OWN, None, f"{platform.system()}: mlx's own BLAS is fast here")
    mlx_first = "mlx.core" in sys.modules
    present = global_provider()
    if present is not None:
        reason = "it was in the process already (LD_PRELOAD?)"
        if mlx_first and not preloaded(present):
            reason += "; whether it came before mlx can't be told, verify() measures it"
        return BlasReport(describe(present), present, reason)
    if mlx_first:
        return BlasReport(MLX_OWN, None, _MLX_FIRST)
    if wanted.lower() == "off":
        return BlasReport(MLX_OWN, None, f"{ENVIRONMENT_VARIABLE}=off")
    if wanted and wanted.lower() != "auto":
        return _load_named(wanted)
    cuda = _cuda_distribution()
    if cuda is not None:
        return BlasReport(MLX_OWN, None, f"{cuda} is installed: mlx computes on the GPU")
    refusals = []
    for path in candidates():
        problem = load_globally(path)
        if problem is None:
            return BlasReport(describe(path), global_provider(), "the first usable one found")
        refusals.append(f"{path}: {problem}")
    found = f"none is usable ({'; '.join(refusals)})" if refusals else "none was found"
    remedy = "install OpenBLAS (Debian: libopenblas0-pthread, Fedora: openblas-threads)"
    return BlasReport(MLX_OWN, None, f"{found}; {remedy}")


def _load_named(wanted: str) -> BlasReport:
    """Loads the library that TINYKV_BLAS names. Raises BlasError if it can't be used."""
    file = Path(wanted).expanduser()
    path = str(file)
    problem = load_globally(path) if file.is_file() else "there is no such file"
    if problem is not None:
        raise BlasError(f"{ENVIRONMENT_VARIABLE}={wanted}: {problem}; allowed: auto, off, or the path of a library")
    return BlasReport(describe(path), path, f"{ENVIRONMENT_VARIABLE} names it")


def _cuda_distribution() -> str | None:
    """Returns the name of the installed CUDA build of mlx, or None."""
    for name in _CUDA_DISTRIBUTIONS:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name
    return None
