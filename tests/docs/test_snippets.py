"""Every snippet of README and documentation is run: Python in this process, console commands in a shell.

The folder they run in holds a tiny model under the name of the real one, so that ``mlx_lm.load`` finds it there. A
``text`` block right after a snippet is what it has to print.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from toml_text import loads

from tinykv_plugin.config import KVCacheConfig

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

NOT_RUN = {
    "python -m pip install tox && python -m tox run -e demo": "fetches a real model; the environment `demo` runs it",
    "python -m pip install tox && python -m tox run": "runs these tests",
    "python -m pip install --no-deps --ignore-requires-python 'mlx-lm>=0.32,<0.33'": "the py310 environments do",
    "python -m pip install .": "the environment `pkg` installs the wheel",
    "mlx.launch -n 2 --backend ring -- python -m tinykv_plugin generate --model path/to/model --prompt Hello "
    "--max-tokens 4": "tests/distributed runs it, in the environment `distributed`",
}


# Commands that were run in another document, in a folder like this one; those with their output below are run again.
DONE: set[str] = set()


@dataclass(frozen=True)
class Snippet:
    language: str
    code: str
    line: int
    expected: str | None


def snippets(document: Path) -> list[Snippet]:
    tokens = MarkdownIt().parse(document.read_text(encoding="utf-8"))
    found = []
    for token, following in itertools.zip_longest(tokens, tokens[1:]):
        if token.type == "fence" and token.map is not None:
            output = following is not None and following.type == "fence" and following.info == "text"
            found.append(Snippet(token.info, token.content, token.map[0] + 1, following.content if output else None))
    return found


def commands(snippet: Snippet) -> list[str]:
    """Lines without a prompt are output, shown for the reader's sake; put what has to match in a text block."""
    lines = snippet.code.splitlines()
    assert lines[0].startswith("$ "), lines
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


@pytest.fixture
def workplace(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("mlx-community/Llama-3.2-3B-Instruct-4bit", "path/to/model"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).symlink_to(tiny_model_dir)
    (tmp_path / "my_script.py").write_text(
        "import mlx_lm\n"
        "model, tokenizer = mlx_lm.load('path/to/model')\n"
        "assert type(mlx_lm.models.cache.make_prompt_cache(model)[0]).__name__ == 'PagedKVCache'\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_snippets_run(document: Path, workplace: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "snippet"}
    for snippet in snippets(document):
        place = f"{document.name}:{snippet.line}"
        if snippet.language == "python":
            printed = run_python(snippet, place, namespace)
        elif snippet.language == "console":
            done = set() if snippet.expected is not None else DONE
            todo = [command for command in commands(snippet) if command not in NOT_RUN and command not in done]
            printed = "".join(run_command(command, place) for command in todo)
            # Others depend on what is in the folder.
            DONE.update(command for command in todo if command.startswith("tinykv ") and "&" not in command)
        elif snippet.language == "toml" and snippet.code.startswith("# tinykv.toml\n"):
            KVCacheConfig(**loads(snippet.code))
            continue
        else:
            # Text, and what Sphinx fills in: literal includes (of files that other tests run) and directives.
            assert snippet.language == "text" or snippet.language.startswith("{"), place
            continue
        if snippet.expected is not None:
            assert printed == snippet.expected, place


def run_python(snippet: Snippet, place: str, namespace: dict[str, Any]) -> str:
    # Moved down, so that a traceback shows the document's line numbers.
    code = compile("\n" * snippet.line + snippet.code, place, "exec")
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(code, namespace)
    return output.getvalue()


def run_command(command: str, place: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{place}: {command}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_every_exemption_is_still_there() -> None:
    shown = {
        command
        for document in DOCUMENTS
        for snippet in snippets(document)
        if snippet.language == "console"
        for command in commands(snippet)
    }
    assert set(NOT_RUN) <= shown
