"""``tinykv run``: a program sees what it would see under ``python``, and its models are attached."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]

SHOW_SELF = """
import json, sys
first = sys.path[0]
print(json.dumps([__name__, __file__, sys.argv, first, sys.modules["__main__"].__dict__ is globals()]))
"""

SHOW_CACHES = """
import sys
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
import mlx.core as mx

model, tokenizer = load(sys.argv[1])
cache = make_prompt_cache(model)
tokens = [int(token) for token, _ in generate_step(mx.array([7, 8, 9]), model, max_tokens=8, prompt_cache=cache)]
print(type(cache[0]).__name__, *tokens)
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "program.py"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def test_a_script_sees_what_python_shows_it(python: Call, script: Call) -> None:
    argv = [script(SHOW_SELF), "a", "--kv-page-size", "--", "b"]
    plain = python(*argv)
    for flags in ([], ["--kv-page-size", "8", "--"]):
        done = python("-m", "tinykv_plugin", "run", *flags, *argv)
        assert (done.code, done.out) == (0, plain.out)


def test_a_module_sees_what_python_shows_it(python: Call, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "inner.py").write_text(SHOW_SELF)
    argv = ["-m", "package.inner", "a", "-m", "--kv-x"]
    plain = python(*argv)
    assert plain.code == 0
    done = python("-m", "tinykv_plugin", "run", *argv)
    assert (done.code, done.out) == (0, plain.out)


def test_a_folder_with_a_main_sees_what_python_shows_it(python: Call, tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("import neighbour\n" + SHOW_SELF)
    (tmp_path / "app" / "neighbour.py").touch()
    plain = python("app", "a")
    done = python("-m", "tinykv_plugin", "run", "app", "a")
    assert plain.code == done.code == 0
    assert json.loads(done.out)[2] == json.loads(plain.out)[2] == ["app", "a"]


def test_the_process_is_as_before_afterwards(tinykv: Call, script: Call) -> None:
    from mlx_lm import utils

    before = list(sys.argv), list(sys.path), sys.modules["__main__"], utils.load_model
    assert tinykv("run", script("import sys; sys.path.append('x'); sys.argv.append('y')")).code == 0
    assert (sys.argv, sys.path, sys.modules["__main__"], utils.load_model) == before


@pytest.mark.parametrize(("text", "code"), [("raise SystemExit", 0), ("exit(3)", 3), ("exit(True)", 1), ("", 0)])
def test_the_exit_code_is_the_programs(tinykv: Call, script: Call, text: str, code: int) -> None:
    assert tinykv("run", script(f"import sys; from sys import exit\n{text}")).code == code


def test_an_exit_message_is_shown_as_python_does(python: Call, script: Call) -> None:
    done = python("-m", "tinykv_plugin", "run", script("import sys; sys.exit('that was wrong')"))
    assert (done.code, done.err) == (1, "that was wrong\n")


def test_an_exception_shows_its_traceback(python: Call, script: Call) -> None:
    done = python("-m", "tinykv_plugin", "run", script("1 / 0"))
    assert done.code == 1
    assert "Traceback" in done.err
    assert done.err.endswith("ZeroDivisionError: division by zero\n")


def test_an_error_of_the_plugin_is_one_line(tinykv: Call, script: Call) -> None:
    path = script("import tinykv_plugin; tinykv_plugin.KVCacheConfig(page_size=0)")
    done = tinykv("run", path)
    assert done.code == 2
    assert done.err.startswith("tinykv: error: page_size: 0 is not allowed")
    assert done.err.count("\n") == 1
    verbose = tinykv("run", "--kv-verbose", path)
    assert verbose.code == 2
    assert f'File "{path}", line 1' in verbose.err


def test_models_the_program_loads_are_attached(tinykv: Call, script: Call, tiny_model_dir: Path) -> None:
    path = script(SHOW_CACHES)
    dense = tinykv("run", "--kv-cache", "dense", path, str(tiny_model_dir))
    paged = tinykv("run", "--kv-stats", "--kv-page-size=8", path, str(tiny_model_dir))
    assert dense.code == paged.code == 0
    name, *tokens = dense.out.split()
    assert name == "KVCache"
    assert paged.out.split() == ["PagedKVCache", *tokens]
    assert "KV pages of tiny" in paged.err
    assert dense.err == ""


def test_help_says_how(tinykv: Call) -> None:
    done = tinykv("run", "--help")
    assert done.code == 0
    assert done.out.startswith("usage: tinykv run ")
    assert "--kv-memory VALUE" in done.out


def test_the_programs_own_help_is_its_own(tinykv: Call, script: Call) -> None:
    done = tinykv("run", script("import sys; print(sys.argv[1:])"), "--help")
    assert done.out == "['--help']\n"
