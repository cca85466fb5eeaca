"""The source distribution, the wheel made from it, and the wheel's first steps in an empty environment."""

from __future__ import annotations

import re
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

from conftest import ROOT, run

PACKAGES = {
    "tinykv_plugin": ROOT / "tinykv_plugin",
    "tinykv_adapters": ROOT / "adapters" / "tinykv_adapters",
    "tinykv_metal": ROOT / "metal" / "tinykv_metal",
}
# A file each, but for what they have in common.
ADAPTERS = [path.stem for path in PACKAGES["tinykv_adapters"].glob("[a-z]*.py") if path.stem != "family"]
BUILT_IN = {
    "paged": "tinykv_plugin.paged_provider",
    "dense": "tinykv_plugin.dense_provider",
    "gather": "tinykv_plugin.gather",
    **{name: f"tinykv_adapters.{name}" for name in ADAPTERS},
    "metal": "tinykv_metal.plugin",
}


def sources() -> set[str]:
    """The files of the packages in the working tree, as they are called in a wheel."""
    return {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def version() -> str:
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "tinykv_plugin" / "__init__.py").read_text(), re.MULTILINE)
    assert found
    return found[1]


def test_the_wheel_is_the_packages_and_their_metadata(wheel: Path) -> None:
    assert wheel.name == f"tinykv_plugin-{version()}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"tinykv_plugin-{version()}.dist-info"
    listed = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    assert names == sources() | listed
    assert {f"{package}/py.typed" for package in PACKAGES} <= names


def test_the_source_distribution_has_all_that_is_needed_to_work_on_it(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for name in (
        *(
            "pyproject.toml",
            "tox.ini",
            "README.md",
            "LICENSE",
            "CHANGELOG.md",
            "CONTRIBUTING.md",
            ".gitignore",
            ".ci/run",
        ),
        *("tests/conftest.py", "tests/packaging/test_distributions.py", "tests/example_plugin/pyproject.toml"),
        *("docs/conf.py", "docs/index.md", "adapters/tinykv_adapters/py.typed"),
    ):
        assert name in names, name
    for folder in ("benchmarks", "native"):
        if any((ROOT / folder).glob("*")):
            assert any(name.startswith(f"{folder}/") for name in names), folder
    assert not [name for name in names if "__pycache__" in name or name.startswith((".tox", "build/", "dist/"))]


def test_the_metadata_says_what_is_needed(metadata: Message) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("tinykv-plugin", version())
    assert (metadata["Requires-Python"], metadata["License-Expression"]) == (">=3.10", "MIT")
    requirements = metadata.get_all("Requires-Dist") or []
    assert "mlx-lm<0.33,>=0.32; python_version >= '3.11'" in requirements
    for pattern in (r"mlx\[cpu\]>=\S+; sys_platform == 'linux'", r"mlx>=\S+; sys_platform == 'darwin'"):
        assert [line for line in requirements if re.fullmatch(pattern, line)], pattern
    assert not metadata.get_all("Provides-Extra"), "what developers need are dependency groups"


def test_every_entry_point_leads_to_a_file(wheel: Path) -> None:
    from configparser import ConfigParser

    parser = ConfigParser()
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        parser.read_string(archive.read(name).decode())
        assert dict(parser["tinykv_plugin"]) == BUILT_IN
        assert dict(parser["console_scripts"]) == {"tinykv": "tinykv_plugin.cli.main:main"}
        for module in (*BUILT_IN.values(), "tinykv_plugin.cli.main"):
            assert f"{module.replace('.', '/')}.py" in archive.namelist()


def test_the_installed_wheel_finds_its_own_plugins(installed: Path, tmp_path: Path) -> None:
    output = run(installed / "tinykv", "plugins", cwd=tmp_path)
    for name in BUILT_IN:
        (line,) = (line for line in output.splitlines() if re.match(rf"[│|] {name} ", line))
        assert "tinykv-plugin" in line, output
    assert run(installed / "tinykv", "plugins", cwd=tmp_path) == run(
        installed / "python", "-m", "tinykv_plugin", "plugins", cwd=tmp_path
    )


def test_the_installed_version_is_the_one_of_the_source(installed: Path, tmp_path: Path) -> None:
    assert f"tinykv-plugin: {version()}\n" in run(installed / "tinykv", "--version", cwd=tmp_path)


def test_the_installed_environment_is_consistent(installed: Path) -> None:
    assert "No broken requirements found" in run(installed / "python", "-m", "pip", "check")
