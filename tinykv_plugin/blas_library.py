"""One BLAS library file: checking it, loading it for the whole process, and asking the process which one it has."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

SYMBOL = "cblas_sgemm"
_CORE_TYPE = "OPENBLAS_CORETYPE"


class _DlInfo(ctypes.Structure):
    _fields_ = [
        ("file", ctypes.c_char_p),
        ("file_base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("symbol_address", ctypes.c_void_p),
    ]


def load_globally(path: str) -> str | None:
    """Loads the library for the whole process if it computes a right product; returns what is wrong with it, or None.

    Modified: the process's global symbols, which can't be undone. OPENBLAS_CORETYPE is left as it was.
    """
    try:
        # First locally: a global library can't be taken back, so it has to be looked at before.
        library = _with_right_kernels(ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL), path)
        problem = _try_product(library)
        if problem is None:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        return str(error)
    return problem


def describe(path: str) -> str:
    """Returns the loaded library's name: OpenBLAS's own words for its build where it has them, else the file's name."""
    library = ctypes.CDLL(path)
    for prefix in ("", "scipy_"):
        config = _text(library, f"{prefix}openblas_get_config")
        if config is not None:
            return " ".join(config.split())
    return Path(path).name


def global_provider() -> str | None:
    """Returns the file that ``cblas_sgemm`` comes from for a library loaded from now on; None if it brings its own."""
    everything = ctypes.CDLL(None)
    symbol = getattr(everything, SYMBOL, None)
    dladdr = getattr(everything, "dladdr", None)
    if symbol is None or dladdr is None:
        return None
    info = _DlInfo()
    dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_DlInfo)]
    if not dladdr(ctypes.cast(symbol, ctypes.c_void_p), ctypes.byref(info)) or not info.file:
        return None
    return os.fsdecode(info.file)


def preloaded(path: str) -> bool:
    """Tells whether LD_PRELOAD names this library, so that it came before everything else."""
    names = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    return any(Path(name).name == Path(path).name for name in names)


def _with_right_kernels(library: ctypes.CDLL, path: str) -> ctypes.CDLL:
    """Returns the library, loaded anew if OpenBLAS chose its oldest kernels on a CPU that has far better ones.

    OpenBLAS before 0.3.25 takes Intel CPUs newer than itself for a Prescott, which costs a factor of five. What
    OPENBLAS_CORETYPE says, if it is set, is respected.
    """
    wanted = _core_type()
    if wanted is None or _CORE_TYPE in os.environ or _text(library, "openblas_get_corename") != "Prescott":
        return library
    dlclose = ctypes.CDLL(None).dlclose
    dlclose.argtypes = [ctypes.c_void_p]
    dlclose(library._handle)
    os.environ[_CORE_TYPE] = wanted
    try:
        return ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL)
    finally:
        del os.environ[_CORE_TYPE]


def _core_type() -> str | None:
    """Returns OpenBLAS's name for the kernels that this x86 CPU can run, None for an old CPU or another kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    if flags >= {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}:
        return "SkylakeX"
    return "Haswell" if flags >= {"avx2", "fma"} else None


def _text(library: ctypes.CDLL, function: str) -> str | None:
    """Returns the string that the library's function of no arguments returns, None if there is no such function."""
    call = getattr(library, function, None)
    if call is None:
        return None
    call.restype = ctypes.c_char_p
    return (call() or b"").decode(errors="replace")


def _try_product(library: ctypes.CDLL) -> str | None:
    """Multiplies two 2 x 2 matrices by the library; returns what is wrong with it, or None."""
    sgemm = getattr(library, SYMBOL, None)
    if sgemm is None:
        return f"it has no {SYMBOL}"
    row_major, no_transpose, size = 101, 111, 2
    matrix = ctypes.POINTER(ctypes.c_float)
    sgemm.argtypes = [
        *[ctypes.c_int] * 6, ctypes.c_float, matrix, ctypes.c_int, matrix, ctypes.c_int,
        ctypes.c_float, matrix, ctypes.c_int,
    ]  # fmt: skip
    sgemm.restype = None
    left, right, product = ((ctypes.c_float * 4)(*values) for values in ((1, 2, 3, 4), (5, 6, 7, 8), (0, 0, 0, 0)))
    sgemm(row_major, no_transpose, no_transpose, size, size, size, 1.0, left, size, right, size, 0.0, product, size)
    return None if list(product) == [19.0, 22.0, 43.0, 50.0] else f"its {SYMBOL} computes a wrong product"
