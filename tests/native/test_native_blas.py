"""The BLAS the package brings: found by the core, right, and taken by mlx when it is loaded first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from tinykv_plugin import blas
(path,) = [path for path in blas.native_blas()]
blas.FINDERS[:] = [blas.native_blas]
report = blas.load_blas()
assert report.path == path, report
import mlx.core as mx, numpy as np
for dtype in (np.float32, np.float64):
    a, b = (np.random.default_rng(i).standard_normal((67, 130)).astype(dtype) for i in range(2))
    with mx.stream(mx.cpu):
        got = np.array(mx.array(a) @ mx.array(b).T)
    assert np.abs(got - a.astype(np.float64) @ b.T.astype(np.float64)).max() < 1e-3
print(report.name, blas.verify().path == path)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mlx's own BLAS is slow on Linux only")
def test_mlx_takes_it(native: object) -> None:
    import tinykv_native

    if not list(Path(tinykv_native.__path__[0]).glob("_blas*.so")):
        pytest.skip("built without scipy-openblas32: no _blas")
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("OpenBLAS")
    assert done.stdout.split()[-1] == "True"
