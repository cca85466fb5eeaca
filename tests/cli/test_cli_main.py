"""The command itself: finding commands, one line for an error, and exit codes."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinykv_plugin.cli import main as cli
from tinykv_plugin.cli import plugins as plugins_command
from tinykv_plugin.cli import version
from tinykv_plugin.cli.mlx_lm_commands import WITH_MAX_KV_SIZE, WITHOUT_KV_CACHE, mlx_lm_commands
from tinykv_plugin.errors import ConfigError, OutOfPagesError, PluginError, TinyKVError

Call = Callable[..., Any]


def one_line(text: str) -> str:
    """The only line of ``text``."""
    assert text.endswith("\n")
    assert text.count("\n") == 1, text
    return text[:-1]


def test_help_lists_every_command(tinykv: Call) -> None:
    for argv in ([], ["-h"], ["--help"]):
        done = tinykv(*argv)
        assert done.code == 0
        assert all(name in done.out for name in [*cli.OWN_COMMANDS, *mlx_lm_commands()])
        assert "--kv-page-size VALUE" in done.out


def test_the_lists_of_commands_name_commands() -> None:
    assert set(mlx_lm_commands()).issuperset(WITHOUT_KV_CACHE | WITH_MAX_KV_SIZE)
    assert {"generate", "chat", "server", "benchmark", "evaluate"} <= set(mlx_lm_commands()) - WITHOUT_KV_CACHE


def test_commands_with_max_kv_size_are_those_that_have_the_flag(tinykv: Call) -> None:
    found = {
        name for name in mlx_lm_commands() if name != "evaluate" and " --max-kv-size MAX" in tinykv(name, "--help").out
    }
    assert found == WITH_MAX_KV_SIZE


def test_version_says_what_a_bug_report_needs(tinykv: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    done = tinykv("--version")
    assert done.code == 0
    lines = dict(line.split(": ", 1) for line in done.out.splitlines())
    assert list(lines) == [
        *("tinykv-plugin", "mlx", "mlx-lm", "python", "platform", "device", "memory", "backends", "other plugins"),
        *("settings", "blas"),
    ]
    assert lines["settings"] == "the defaults"
    assert "GiB, for a model" in lines["memory"]
    if importlib.util.find_spec("tinykv_example"):
        assert "example (tinykv-example 1.2.3)" in lines["other plugins"]
    (tmp_path / "tinykv.toml").write_text("page_size = 64", encoding="utf-8")
    assert "settings: page_size = 64\n" in tinykv("--version").out
    monkeypatch.setenv("TINYKV_MEMORY", "much")
    assert "settings: memory: 'much' is not allowed (from the environment variable TINYKV_MEMORY)" in (
        tinykv("--version").out
    )
    assert lines["device"].startswith(("cpu", "gpu"))


def test_version_says_which_backends_can_serve_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import mlx.core as mx

    def backends(metal: bool, device: mx.DeviceType) -> list[str]:
        monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device))
        usable, others = version._backends().split("; not usable here: ")
        return [usable.removesuffix(", example"), others]  # where the example plugin is installed

    monkeypatch.chdir(tmp_path)
    usable, others = backends(False, mx.cpu)
    assert usable.split(", ")[-1] == "gather", "the best first"
    assert "metal (mlx has no Metal here)" in others
    assert "metal (mlx computes on Device(cpu, 0) here)" in backends(True, mx.cpu)[1]
    assert "metal, gather" in backends(True, mx.gpu)[0]
    monkeypatch.setenv("TINYKV_PAGE_SIZE", "6")
    usable, others = backends(True, mx.gpu)
    assert usable.endswith("gather")
    assert "metal (page size 6 (multiples of 4 are supported))" in others
    monkeypatch.setenv("TINYKV_PAGE_SIZE", "none")
    assert "metal, gather" in backends(True, mx.gpu)[0]


def test_the_module_is_the_command_and_loads_a_blas_before_mlx(python: Call) -> None:
    done = python("-m", "tinykv_plugin", "--version")
    assert done.code == 0
    assert done.err == ""
    assert "mlx was imported first" not in done.out


def test_nothing_imports_mlx_before_a_command_runs(python: Call) -> None:
    done = python("-c", "import sys, tinykv_plugin.cli.main; print([n for n in sys.modules if n.startswith('mlx')])")
    assert done.out == "[]\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["genrate"], "there is no command genrate; did you mean generate? (tinykv --help lists the commands)"),
        (["inspct"], "there is no command inspct; did you mean inspect? (tinykv --help lists the commands)"),
        (["zzzzzz"], "there is no command zzzzzz (tinykv --help lists the commands)"),
        (["--kv-stats", "generate"], "--kv-stats: the command comes first, then its options"),
        (["generate", "--kv-foo"], "--kv-foo is not known"),
        (["generate", "--kv-page-size"], "--kv-page-size needs a value"),
        (["generate", "--kv-page-size", "0"], "page_size: 0 is not allowed: "),
        (["generate", "--kv-memory", "lots"], "memory: 'lots' is not allowed: "),
        (["generate", "--kv-cache", "nope"], "cache: 'nope' is not known; there are: dense, "),
        (["generate", "--kv-attention", "nope"], "attention: 'nope' is not known; there are: auto, "),
        (["chat", "--max-kv-size", "4"], "max_kv_size: 4 is not allowed: "),
        (["generate", "--kv-bits", "7"], "bits: 7 is not allowed: it must be one of 4, 5, 6, 8"),
        (["generate", "--kv-key-bits", "all"], "key_bits: 'all' is not allowed: it must be one of 4, 5, 6, 8"),
        (["generate", "--kv-quantized-start", "-1"], "quantized_start: '-1' is not allowed: "),
        (["convert", "--kv-stats"], "convert uses no KV cache, so it takes no --kv- flags"),
        (["run"], "run needs a script or -m module"),
        (["run", "-m"], "run needs a module after -m"),
        (["run", "--kv-stats", "--"], "run needs a script or -m module"),
        (["run", "--foo", "script.py"], "run: --foo is not known; the program's own arguments come after the program"),
        (["run", "-m", "no_such_module"], "run: there is no module no_such_module"),
        (["run", "-m", "no.such.module"], "run: there is no module no.such.module"),
        (["run", "-m", "tinykv_plugin.nothing"], "run: there is no module tinykv_plugin.nothing"),
        (["run", "no_such_script.py"], "run: there is no file no_such_script.py"),
        (["run", "--kv-rewind", "x", "setup.py"], "setup.py"),
        (["demo", "--kv-rewind", "-1"], "rewind: '-1' is not allowed: "),
        (["inspect", "--kv-max-pages", "0", "folder"], "max_pages: 0 is not allowed: "),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(tinykv: Call, argv: list[str], message: str) -> None:
    done = tinykv(*argv)
    assert done.code == 2
    assert done.out == ""
    assert message in one_line(done.err)
    assert done.err.startswith("tinykv: error: ")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["inspect", "no_such_folder"], "no_such_folder is no folder and no file; give a model's folder"),
        (["demo", "--model", "no_such_folder"], "no_such_folder is no folder; --model takes the folder of a model"),
    ],
)
def test_what_fails_is_one_line_and_exit_code_1(tinykv: Call, argv: list[str], message: str) -> None:
    done = tinykv(*argv)
    assert done.code == 1
    assert message in one_line(done.err)


def test_a_folder_that_is_no_model_is_one_line(tinykv: Call, tmp_path: Path) -> None:
    for argv in (["inspect"], ["demo", "--model"]):
        done = tinykv(*argv, str(tmp_path))
        assert done.code == 1
        assert f"the model in {tmp_path} can't be loaded: FileNotFoundError" in one_line(done.err)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("memory", "no"), 2),
        (PluginError("broken"), 2),
        (TinyKVError("no"), 1),
        (OutOfPagesError(2, 1, 4, 1024, 16, "memory"), 1),
    ],
)
def test_errors_of_the_package_become_one_line(
    tinykv: Call, monkeypatch: pytest.MonkeyPatch, error: TinyKVError, code: int
) -> None:
    def fail(argv: object) -> int:
        raise error

    monkeypatch.setattr(plugins_command, "plugins", fail)
    done = tinykv("plugins")
    assert done.code == code
    assert one_line(done.err) == f"tinykv: error: {error}"


def test_other_errors_are_not_hidden(tinykv: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(plugins_command, "plugins", fail)
    with pytest.raises(ZeroDivisionError):
        tinykv("plugins")


def test_an_interrupt_is_quiet(tinykv: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(argv: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(plugins_command, "plugins", interrupt)
    done = tinykv("plugins")
    assert (done.code, done.out, done.err) == (130, "", "")


def test_a_closed_pipe_is_quiet(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "tinykv_plugin", "--help"], stdout=closed, stderr=subprocess.PIPE, timeout=60
        )
    assert done.returncode == 141
    assert done.stderr == b""


def test_a_pipe_that_breaks_elsewhere_is_an_error(tinykv: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(plugins_command, "plugins", fail)
    with pytest.raises(BrokenPipeError):
        tinykv("plugins")


def test_ctrl_c_ends_a_program_with_130(tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    script.write_text("print('ready', flush=True)\nimport time\ntime.sleep(60)\n")
    # A shell without job control starts background programs, perhaps these tests, with the signal ignored.
    start = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from tinykv_plugin.cli.main import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", start, "run", str(script)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30) == (b"", b"")
    assert process.returncode == 130


def test_a_blas_that_is_missing_is_one_line(python: Call) -> None:
    done = python("-m", "tinykv_plugin", "plugins", env={"TINYKV_BLAS": "/no/such/library.so"})
    if sys.platform.startswith("linux"):
        assert done.code == 1
        assert "TINYKV_BLAS" in one_line(done.err)
