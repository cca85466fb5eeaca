"""Pins what CI installs: prints the versions installed here of everything that pyproject.toml asks for.

    python .ci/pin.py > .ci/constraints.txt

Run it in an environment with all dependency groups, after the tests have passed in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import tomllib
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def canonical(name: str) -> str:
    """``name`` as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted() -> Iterator[Requirement]:
    """What the project and its dependency groups ask for by name."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))
    lists = [project["project"]["dependencies"], project["build-system"]["requires"]]
    for requirements in [*lists, *project["dependency-groups"].values()]:
        yield from (Requirement(line) for line in requirements if isinstance(line, str))


def pinned() -> dict[str, str]:
    """Name and version of those, and of what they need in turn; with a marker if the oldest Python can't have it."""
    found: dict[str, str] = {}
    todo = list(wanted())
    while todo:
        requirement = todo.pop()
        name = canonical(requirement.name)
        if requirement.marker is not None and not any(
            requirement.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras, "cpu")
        ):
            continue
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue
        if name not in found:
            found[name] = installed.version + _marker(installed.metadata["Requires-Python"])
            todo += [Requirement(line) for line in installed.requires or ()]
    return found


def _marker(pythons: str | None) -> str:
    return "" if SpecifierSet(pythons or "").contains("3.10") else '; python_version >= "3.11"'


if __name__ == "__main__":
    print("# Made by .ci/pin.py: the versions that CI tests with.")
    for name, version in sorted(pinned().items()):
        print(f"{name}=={version}")
