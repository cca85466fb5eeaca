"""The BLAS under mlx: chosen before mlx is imported, so nearly every test needs an interpreter of its own."""

from __future__ import annotations

import _ctypes
import json
import os
import platform
import subprocess
import sys
import textwrap
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from tinykv_plugin import blas

LINUX = sys.platform.startswith("linux")
SHOW = """
import json, sys
print(json.dumps({"name": report.name, "path": report.path, "reason": report.reason}))
"""


def run(code: str, *, debug: bool = False, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the code in a new interpreter, without what this one's environment says about BLAS."""
    clean = {key: value for key, value in os.environ.items() if key not in {"TINYKV_BLAS", "LD_PRELOAD"}}
    root = str(Path(blas.__file__).parents[1])
    path = os.pathsep.join(filter(None, [environment.pop("PYTHONPATH", ""), root, os.environ.get("PYTHONPATH", "")]))
    clean.update({"PYTHONPATH": path, **environment}, **({"LD_DEBUG": "bindings"} if debug else {}))
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=clean, capture_output=True, text=True, check=False)


def report_of(code: str, **environment: Any) -> dict[str, Any]:
    """Returns the report that the code leaves in ``report``."""
    done = run(textwrap.dedent(code) + SHOW, **environment)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


LOAD = "from tinykv_plugin.blas import load_blas; report = load_blas()"


@pytest.fixture
def openblas() -> str:
    """The system's OpenBLAS."""
    path = next(blas.system_openblas(), None) if LINUX else None
    if path is None:
        pytest.skip("no system OpenBLAS (Debian: libopenblas0-pthread)")
    return path


@pytest.fixture
def library() -> str:
    """A library with cblas_sgemm that is surely here: the one that mlx brings for itself."""
    if not LINUX:
        pytest.skip("mlx's own BLAS is a file of its own on Linux only")
    files = distribution("mlx-cpu").files or []
    return next(str(Path(str(file.locate())).resolve()) for file in files if file.name.startswith("libblas-"))


linux_only = pytest.mark.skipif(not LINUX, reason="a BLAS can be put under mlx on Linux only")


def test_importing_it_imports_no_mlx() -> None:
    code = """
    import sys
    from tinykv_plugin.blas import blas_report
    report = blas_report()
    assert not [name for name in sys.modules if name.startswith("mlx")]
    """
    assert report_of(code) == {"name": "mlx's own", "path": None, "reason": "load_blas() has not run"}


def test_mlx_is_bound_to_what_the_report_says(openblas: str) -> None:
    code = LOAD + (
        "\nfrom tinykv_plugin.blas import verify\ncheck = verify()\n"
        "assert check.path == report.path and check.gflops > 0, check\n"
        "import mlx.core as mx\nassert mx.array_equal(mx.ones((64, 64)) @ mx.ones((64, 64)), mx.full((64, 64), 64.0))\n"
    )
    done = run(code + SHOW, debug=True)
    assert done.returncode == 0, done.stderr[-500:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["path"] == openblas
    assert "OpenBLAS" in report["name"]
    bindings = [line for line in done.stderr.splitlines() if "libmlx.so" in line and "`cblas_sgemm'" in line]
    assert bindings
    assert all(f"to {openblas}" in line for line in bindings)


def test_a_second_call_changes_nothing(library: str) -> None:
    code = "import os; " + LOAD + "; os.environ['TINYKV_BLAS'] = 'off'; assert load_blas() is report"
    assert report_of(code, TINYKV_BLAS=library)["path"] == library


@linux_only
def test_off_leaves_mlx_its_own() -> None:
    code = (
        LOAD
        + "\nfrom tinykv_plugin.blas import blas_report, verify\nassert verify().path is None is blas_report().path"
    )
    assert report_of(code, TINYKV_BLAS="OFF") == {"name": "mlx's own", "path": None, "reason": "TINYKV_BLAS=off"}


def test_a_named_library_is_the_one_loaded(library: str) -> None:
    code = LOAD + "\nfrom tinykv_plugin.blas import verify\nassert verify().path == report.path"
    report = report_of(code, TINYKV_BLAS=library)
    assert report == {"name": Path(library).name, "path": library, "reason": "TINYKV_BLAS names it"}


@linux_only
@pytest.mark.parametrize(
    ("content", "problem"), [(None, "there is no such file"), ("text", "invalid ELF header"), ("", "file too short")]
)
def test_a_named_file_that_is_no_library_is_an_error(tmp_path: Path, content: str | None, problem: str) -> None:
    path = tmp_path / "lib.so"
    if content is not None:
        path.write_text(content.ljust(4096) if content else "")
    done = run(LOAD, TINYKV_BLAS=str(path))
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"tinykv_plugin.errors.BlasError: TINYKV_BLAS={path}: "), done.stderr
    assert problem in last


@linux_only
def test_a_named_library_without_the_symbol_is_an_error() -> None:
    done = run(LOAD, TINYKV_BLAS=str(_ctypes.__file__))
    assert "it has no cblas_sgemm; allowed: auto, off, or the path of a library" in done.stderr.splitlines()[-1]


@linux_only
def test_after_mlx_it_does_nothing_and_says_so(library: str) -> None:
    code = "import mlx.core; " + LOAD + "\nfrom tinykv_plugin.blas import verify\nassert verify().path is None"
    report = report_of(code, TINYKV_BLAS=library)
    assert (report["name"], report["path"]) == ("mlx's own", None)
    assert report["reason"].startswith("mlx was imported first; import tinykv_plugin.blas")


@pytest.mark.parametrize("first", ["", "import mlx.core; "])
def test_a_preloaded_library_is_reported(library: str, first: str) -> None:
    report = report_of(first + LOAD, LD_PRELOAD=library, TINYKV_BLAS="off")
    assert report == {
        "name": Path(library).name,
        "path": library,
        "reason": "it was in the process already (LD_PRELOAD?)",
    }


def test_an_order_that_cannot_be_told_is_admitted(library: str) -> None:
    code = f"import ctypes, mlx.core; ctypes.CDLL({library!r}, mode=ctypes.RTLD_GLOBAL); {LOAD}"
    assert "verify() measures it" in report_of(code)["reason"]


def test_unusable_candidates_are_passed_over(library: str, tmp_path: Path) -> None:
    code = f"""
    from tinykv_plugin import blas
    blas.FINDERS[:] = [lambda: iter([{str(tmp_path)!r}, {_ctypes.__file__!r}]), lambda: iter([{library!r}])]
    report = blas.load_blas()
    """
    assert report_of(code)["path"] == library


@linux_only
def test_without_a_candidate_the_reason_says_what_to_install() -> None:
    code = "from tinykv_plugin import blas; blas.FINDERS.clear(); report = blas.load_blas()"
    report = report_of(code)
    assert report["path"] is None
    assert "libopenblas0-pthread" in report["reason"]


def test_the_native_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "tinykv_native"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "_blas.cpython.so").touch()
    (package / "_kernels.so").touch()
    monkeypatch.delitem(sys.modules, "tinykv_native", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert list(blas.native_blas()) == [str(package / "_blas.cpython.so")]
    assert list(blas.candidates())[-1] == str(package / "_blas.cpython.so")
    assert "tinykv_native" not in sys.modules


@linux_only
def test_beside_a_gpu_build_of_mlx_nothing_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "mlx_cuda_12-1.0.dist-info").mkdir()
    (tmp_path / "mlx_cuda_12-1.0.dist-info" / "METADATA").write_text("Name: mlx-cuda-12\nVersion: 1.0\n")
    report = report_of(LOAD, PYTHONPATH=str(tmp_path))
    assert report == {
        "name": "mlx's own",
        "path": None,
        "reason": "mlx-cuda-12 is installed: mlx computes on the GPU",
    }


def test_elsewhere_than_on_linux_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(blas, "_report", None)
    assert blas.load_blas().path is None
    assert "mlx's own BLAS is fast here" in blas.blas_report().reason


@pytest.mark.skipif(platform.machine() != "x86_64", reason="OpenBLAS's names of x86 kernels")
def test_openblas_uses_kernels_of_this_decade(openblas: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if LINUX and " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no AVX2")
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    code = LOAD + "\nimport os; assert 'OPENBLAS_CORETYPE' not in os.environ"
    name = report_of(code, TINYKV_BLAS=openblas)["name"]
    assert "Prescott" not in name
    # What the user chose is left alone, be it slower.
    assert "Nehalem" in report_of(LOAD, TINYKV_BLAS=openblas, OPENBLAS_CORETYPE="Nehalem")["name"]


ATTACH = """
import sys
from mlx_lm.models import llama
import tinykv_plugin as tinykv
arguments = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "num_attention_heads": 2}
model = llama.Model(llama.ModelArgs("llama", **arguments, rms_norm_eps=1e-5, vocab_size=50))
for _ in range(2):
    with tinykv.attach(model) as kv:
        pass
"""


@linux_only
def test_a_program_that_imports_mlx_first_gets_a_hint_once(openblas: str) -> None:
    hint = (
        "mlx was imported before a fast BLAS, so it multiplies matrices slowly: call tinykv_plugin.blas.load_blas() "
        "before anything imports mlx, or start the program with `tinykv run` (TINYKV_BLAS=off: no hint)\n"
    )
    for first in ("", "import mlx.core; from tinykv_plugin.blas import load_blas; load_blas()\n"):
        done = run(first + ATTACH)
        assert (done.returncode, done.stderr) == (0, hint)
    for quiet in (run(LOAD + ATTACH), run(ATTACH, TINYKV_BLAS="Off"), run(ATTACH, LD_PRELOAD=openblas)):
        assert (quiet.returncode, quiet.stderr) == (0, "")


def test_no_hint_where_mlx_needs_no_other_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx.core as mx

    monkeypatch.setattr(blas, "_report", None)
    monkeypatch.setattr(blas, "global_provider", lambda: None)
    monkeypatch.delenv("TINYKV_BLAS", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    assert blas.hint()
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert not blas.hint()
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not blas.hint()
