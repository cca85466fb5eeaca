"""Every error message of ours is looked at by a test: the words of each are found in the tests."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import tinykv_plugin
from tinykv_plugin.errors import InvariantError, TinyKVError

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / "tinykv_plugin", ROOT / "adapters" / "tinykv_adapters"]

# So many words in a row, as a test has them, are enough to know a message by; or two that no other message has.
WINDOW = 3


def subclasses(kind: type[Exception]) -> set[str]:
    return {kind.__name__}.union(*map(subclasses, kind.__subclasses__()))


@cache
def our_errors() -> set[str]:
    for module in pkgutil.walk_packages(tinykv_plugin.__path__, "tinykv_plugin."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return subclasses(TinyKVError) - subclasses(InvariantError)


def texts(tree: ast.AST) -> Iterator[str]:
    """The constant parts of the strings in ``tree``, ``\\0`` where an f-string has a value."""
    inside = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
            inside |= {id(part) for part in node.values}
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


def windows(text: str, size: int = WINDOW) -> set[str]:
    """Every ``size`` words in a row of a text, without those that a value is part of."""
    found = set()
    for part in text.replace("\\", "").split("\0"):
        words = re.findall(r"[\w'/-]+", part)
        found |= {" ".join(words[start : start + size]) for start in range(len(words) - size + 1)}
    return found


@cache
def messages() -> list[tuple[str, str]]:
    """Where each message of ours is made, and its text."""
    return list(_messages())


def _messages() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") in our_errors():
                    found = [text for argument in node.args for text in texts(argument)]
                    text = max(found, key=lambda text: len(windows(text)), default="")
                    if windows(text, 2):
                        yield f"{path.relative_to(ROOT)}:{node.lineno}", text


@cache
def strings_of_tests() -> list[str]:
    paths = (ROOT / "tests").rglob("*.py")
    return [text for path in paths for text in texts(ast.parse(path.read_text(encoding="utf-8"))) if " " in text]


@cache
def looked_at() -> set[str]:
    return {window for text in strings_of_tests() for size in (2, WINDOW) for window in windows(text, size)}


@cache
def all_texts() -> str:
    return "\n".join(text.replace("\\", "").replace("\n", " ") for text in strings_of_tests())


def is_quoted(text: str) -> bool:
    """Whether a test has the message with values of its own."""
    pattern = "[^\n]+".join(re.escape(part) for part in text.strip("\0").split("\0"))
    return re.search(pattern, all_texts()) is not None


@cache
def pairs() -> Counter[str]:
    return Counter(pair for _, text in messages() for pair in windows(text, 2))


def test_there_are_many() -> None:
    assert len(messages()) > 40


@pytest.mark.parametrize(("place", "text"), [pytest.param(*found, id=found[0]) for found in messages()])
def test_a_test_looks_at(place: str, text: str) -> None:
    known_by = windows(text) | {pair for pair in windows(text, 2) if pairs()[pair] == 1}
    assert known_by & looked_at() or is_quoted(text), f"{place}: no test looks at {text!r}"
