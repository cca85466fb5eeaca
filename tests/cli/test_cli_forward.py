"""Commands of mlx-lm under ``tinykv``: their own arguments and help, settings, and what is refused."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinykv_plugin.cli.flags import take_kv_flags
from tinykv_plugin.cli.forward import MAX_KV_SIZE, SHORTEST_MAX_KV_SIZE, asks_for_help, configuration, take_value
from tinykv_plugin.cli.mlx_lm_commands import mlx_lm_commands
from tinykv_plugin.config import KVCacheConfig

Call = Callable[..., Any]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What mlx-lm's ``chat`` is started with, in place of starting it."""
    from mlx_lm import chat, utils

    noted: dict[str, Any] = {}

    def note_arguments() -> None:
        noted.update(argv=sys.argv, loader=utils.load_model)

    monkeypatch.setattr(chat, "main", note_arguments)
    return noted


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Callable[..., KVCacheConfig]:
    """``settings("--kv-page-size", "8")``: the settings that ``tinykv chat`` would attach with."""
    from mlx_lm import chat

    from tinykv_plugin.cli import forward
    from tinykv_plugin.cli.main import main

    def get(*argv: str) -> KVCacheConfig:
        configs: list[KVCacheConfig] = []
        monkeypatch.setattr(forward, "check_plugins", configs.append)
        monkeypatch.setattr(chat, "main", lambda: None)
        assert main(["chat", *argv]) == 0
        return configs[0]

    return get


def test_mlx_lms_arguments_are_untouched(tinykv: Call, seen: dict[str, Any]) -> None:
    before = sys.argv
    argv = ["--model", "m", "--kv-stats", "-m", "4", "--kv-page-size=8", "--", "--kv-foo"]
    done = tinykv("chat", *argv)
    assert done.code == 0
    assert seen["argv"] == ["tinykv chat", "--model", "m", "-m", "4", "--", "--kv-foo"]
    assert sys.argv is before
    assert done.err == "tinykv: no paged cache was used\n"


@pytest.mark.parametrize(
    ("argv", "start"),
    [
        (["generate", "--kv-bits=4", "--quantized-kv-start", "9"], 9),
        (["server", "--kv-bits=4", "--quantized=9"], 9),
        (["generate", "--kv-bits=4", "--kv-quantized-start=7", "--quantized-kv-start", "9"], 7),
        (["generate", "--kv-bits=4", "--", "--quantized-kv-start", "9"], 0),
        (["generate", "--kv-bits=4"], 0),
        (["chat", "--kv-bits=4", "--kv-quantized-start=7"], 7),
    ],
    ids=str,
)
def test_when_to_quantize_is_taken_from_mlx_lms_flag(argv: list[str], start: int) -> None:
    fields, rest = take_kv_flags(argv[1:])
    config, rest = configuration(mlx_lm_commands()[argv[0]], fields, rest)
    assert config.quantized_start == start
    assert rest == [argument for argument in argv[1:] if not argument.startswith("--kv-")], "mlx-lm sees its own flags"


def test_the_loader_is_restored(tinykv: Call, seen: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_lm import chat, utils

    before = utils.load_model
    tinykv("chat")
    assert seen["loader"] is not before
    assert utils.load_model is before

    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(chat, "main", fail)
    with pytest.raises(ZeroDivisionError):
        tinykv("chat")
    assert utils.load_model is before


@pytest.mark.parametrize("command", ["generate", "chat", "server", "benchmark", "cache_prompt"])
def test_help_shows_both(tinykv: Call, command: str) -> None:
    for flag in ("--help", "-h", "--hel"):
        done = tinykv(command, "--kv-page-size", "8", flag)
        assert done.code == 0
        theirs, ours = done.out.split("paged KV cache:")
        assert f"usage: tinykv {command} [-h]" in theirs
        assert "--model MODEL" in theirs
        assert "--kv-page-size VALUE" in ours


def test_commands_without_a_cache_are_forwarded_as_they_are(tinykv: Call) -> None:
    done = tinykv("convert", "--help")
    assert done.code == 0
    assert "usage: tinykv convert" in done.out
    assert "--kv-page-size" not in done.out


def test_wrong_arguments_are_mlx_lms_to_report(tinykv: Call) -> None:
    done = tinykv("generate", "--no-such-flag")
    assert done.code == 2
    assert "tinykv generate: error: unrecognized arguments: --no-such-flag" in done.err
    done = tinykv("chat", "--kv-cache", "dense", "--kv-bits", "4")
    assert done.code == 2
    assert "tinykv chat: error: unrecognized arguments: --kv-bits 4" in done.err


def test_a_command_that_lacks_a_package_says_which(tinykv: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "mlx_lm.evaluate", raising=False)
    done = tinykv("evaluate", "--model", "m", "--tasks", "t")
    assert done.code == 1
    assert "tinykv: error: mlx-lm's evaluate can't be imported: " in done.err
    assert "lm_eval" in done.err
    assert done.err.endswith("install what it needs (pip install 'mlx-lm[evaluate]')\n")


def test_flag_beats_environment_beats_file(
    settings: Callable[..., KVCacheConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tinykv.toml").write_text('page_size = 4\nmemory = "1MiB"\nrewind = 7\nstats = true\n')
    monkeypatch.setenv("TINYKV_PAGE_SIZE", "8")
    monkeypatch.setenv("TINYKV_MEMORY", "2MiB")
    config = settings("--kv-page-size", "16", "--no-kv-stats")
    assert (config.page_size, config.memory, config.rewind, config.stats) == (16, 2 << 20, 7, False)


def test_the_source_of_a_wrong_value_is_named(tinykv: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TINYKV_REWIND", "x")
    done = tinykv("generate")
    assert done.code == 2
    assert "TINYKV_REWIND" in done.err
    assert tinykv("generate", "--help").code == 0
    monkeypatch.delenv("TINYKV_REWIND")
    (tmp_path / "tinykv.toml").write_text("rewind = 'x'")
    done = tinykv("generate")
    assert done.code == 2
    assert "tinykv.toml" in done.err


def test_max_kv_size_is_taken_from_mlx_lms_flag(
    settings: Callable[..., KVCacheConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settings().max_kv_size is None
    assert settings("--max-kv-size", "64").max_kv_size == 64
    assert settings("--max-kv-size", "64", "--kv-max-kv-size", "128").max_kv_size == 128
    monkeypatch.setenv("TINYKV_MAX_KV_SIZE", "256")
    assert settings().max_kv_size == 256
    assert settings("--max-kv-size=64").max_kv_size == 64
    # Anything goes with mlx-lm's own caches.
    assert settings("--max-kv-size=4", "--kv-cache", "dense").max_kv_size == 256


def test_our_max_kv_size_beats_mlx_lms(tinykv: Call, seen: dict[str, Any]) -> None:
    tinykv("chat", "--max-kv-size", "64", "--model", "m")
    assert seen["argv"][1:] == ["--max-kv-size", "64", "--model", "m"]
    tinykv("chat", "--max-kv-size", "64", "--model", "m", "--kv-max-kv-size", "128")
    assert seen["argv"][1:] == ["--model", "m"]


@pytest.mark.parametrize(
    ("argv", "found", "others"),
    [
        ([], None, []),
        (["a", "--max-kv-size", "64", "b"], "64", ["a", "b"]),
        (["--max-kv-size=64", "b"], "64", ["b"]),
        (["--max-k", "64"], "64", []),
        (["--max-kv=64", "b", "--max-kv-size", "32"], "32", ["b"]),
        (["--max", "64"], None, ["--max", "64"]),
        (["--max-tokens", "64"], None, ["--max-tokens", "64"]),
        (["b", "--max-kv-size"], None, ["b", "--max-kv-size"]),
        (["--max-kv-size", "many"], None, ["--max-kv-size", "many"]),
        (["--max-kv-size", "8", "--", "--max-kv-size", "64"], "8", ["--", "--max-kv-size", "64"]),
    ],
)
def test_max_kv_size_is_read_as_argparse_would(argv: list[str], found: str | None, others: list[str]) -> None:
    assert take_value(argv, MAX_KV_SIZE, SHORTEST_MAX_KV_SIZE) == (found, others)
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-kv-size")
    parser.add_argument("--max-tokens")
    parser.add_argument("rest", nargs="*")
    if found is not None:
        assert parser.parse_known_args(argv)[0].max_kv_size == found


def test_help_is_recognised_as_argparse_would() -> None:
    assert all(asks_for_help(["--model", "m", flag]) for flag in ("-h", "--help", "--he", "--h"))
    assert not any(asks_for_help(argv) for argv in ([], ["--", "--help"], ["--prompt=--help"], ["help"], ["--"]))


def test_verbose_logs_to_standard_error(tinykv: Call, tiny_model_dir: Path) -> None:
    import logging

    log = logging.getLogger("tinykv")
    before = log.level, log.propagate, list(log.handlers)
    done = tinykv("inspect", "--kv-verbose", str(tiny_model_dir))
    assert done.code == 0
    assert (log.level, log.propagate, log.handlers) == before


@pytest.mark.parametrize("command", ["generate", "chat", "benchmark"])
def test_a_model_that_cant_be_had_is_one_line(
    tinykv: Call, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import mlx_lm.utils

    monkeypatch.chdir(tmp_path)
    before = mlx_lm.utils._download
    done = tinykv(command, "--model", "no-such-model")
    assert done.code == 1
    (line,) = done.err.splitlines()
    assert line.startswith(
        "tinykv: error: the model no-such-model can't be had: there is no such folder, and it can't be fetched: "
    )
    assert mlx_lm.utils._download is before
