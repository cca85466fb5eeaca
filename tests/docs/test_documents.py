"""What the documents say agrees with the code and with each other."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from toml_text import loads

from tinykv_plugin import errors
from tinykv_plugin.config import KVCacheConfig

ROOT = Path(__file__).parents[2]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_table_of_settings_is_current(tmp_path: Path) -> None:
    """If this fails: python docs/settings.py"""
    code = "import sys; sys.path.insert(0, 'docs'); import settings; print(settings.renewed(sys.stdin.read()), end='')"
    renewed = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, input=read("README.md"), capture_output=True, text=True, check=True
    )
    assert renewed.stdout == read("README.md")


def test_every_setting_is_in_the_table() -> None:
    assert all(f"| `{name}` |" in read("README.md") for name in KVCacheConfig.model_fields)


def test_every_error_has_its_place_in_troubleshooting() -> None:
    defined = {name for name, item in vars(errors).items() if isinstance(item, type) and name.endswith("Error")}
    explained = set(re.findall(r"^`(\w+)`\n: ", read("docs/troubleshooting.md"), re.MULTILINE))
    assert explained == defined - {"TinyKVError"}


def test_ci_runs_the_command_of_the_readme() -> None:
    command = "python -m pip install tox && python -m tox run"
    assert f"$ {command}\n" in read("README.md")
    assert command in read(".ci/run")


def test_python_versions_agree() -> None:
    versions = re.findall(r"Python :: 3\.(\d+)", read("pyproject.toml"))
    assert f"py3{{{','.join(versions)}}}-core" in read("tox.ini")
    assert f"Python 3.{versions[0]} to 3.{versions[-1]}" in read("README.md")


def test_every_folder_of_tests_is_run_by_default_or_by_an_environment_of_its_own() -> None:
    folders = {path.parent.relative_to(ROOT).parts[1] for path in (ROOT / "tests").glob("*/test_*.py")}
    default = set(re.findall(r'"tests/(\w+)"', read("pyproject.toml").split("testpaths = ")[1].splitlines()[0]))
    assert folders <= default | {"archs", "distributed", "native", "packaging"}
    assert '"tests/archs/test_[!a]*.py"' in read("pyproject.toml"), "all but the architectures themselves"
    assert "pytest tests{/}archs" in read("tox.ini") and "pytest tests{/}distributed" in read("tox.ini")


def test_the_table_of_models_is_current() -> None:
    """If this fails: python docs/models.py"""
    code = "import json, sys; sys.path[:0] = ['docs']; import models; print(models.page(json.load(sys.stdin)), end='')"
    command, table = [sys.executable, "-c", code], read("docs/models.json")
    page = subprocess.run(command, cwd=ROOT, input=table, capture_output=True, text=True, check=True)
    assert page.stdout == read("docs/models.md")
    assert f"{len(json.loads(table)['models'])} of its model files are tested" in read("README.md")


def test_the_command_reference_is_current() -> None:
    """If this fails: python docs/commands.py"""
    code = "import sys; sys.path.insert(0, 'docs'); import commands; print(commands.command_reference(), end='')"
    renewed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert renewed.stdout == read("docs/commands.md")


def test_the_figures_are_those_of_the_data() -> None:
    """If this fails: python docs/figures.py"""
    code = (
        "import sys, json; sys.path.insert(0, 'docs'); import figures;"
        "print(figures.renewed(sys.stdin.read()), end='');"
        "pictures = figures.charts(json.loads(figures.DATA.read_text()));"
        "assert all((figures.FOLDER / 'images' / f'{name}.svg').read_text() == svg for name, svg in pictures.items())"
    )
    page = read("docs/benchmarks.md")
    renewed = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, input=page, capture_output=True, text=True, check=True
    )
    assert renewed.stdout == page


def test_every_environment_variable_is_explained() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tinykv_plugin").rglob("*.py")]
    names = {name for source in sources for name in re.findall(r'"(TINYKV_[A-Z_]*[A-Z])"', source)}
    assert {"TINYKV_BLAS", "TINYKV_CACHE_DIR", "TINYKV_DISABLE_PLUGINS"} <= names
    assert [name for name in names if f"\n`{name}`\n: " not in read("docs/configuration.md")] == []


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = set(re.findall(r"^([\w-]+)$", read("docs/index.md"), re.MULTILINE))
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages <= listed


def test_every_command_is_in_the_reference() -> None:
    from tinykv_plugin.cli.main import OWN_COMMANDS

    page = read("docs/commands.md")
    assert [name for name in OWN_COMMANDS if f"\n## tinykv {name}\n" not in page] == []


def test_every_metric_is_explained() -> None:
    source = read("tinykv_plugin/serving/metrics.py")
    names = set(re.findall(r'"(tinykv_\w+)"', source))
    page = read("docs/server.md")
    explained = {name.removesuffix("_total") for name in re.findall(r"`(tinykv_\w+)", page)}
    assert {name.removesuffix("_total") for name in names} <= explained


def test_ci_pins_what_is_asked_for() -> None:
    """If this fails: python .ci/pin.py > .ci/constraints.txt, in an environment with all dependency groups."""
    from packaging.requirements import Requirement

    pins = dict(
        line.partition(";")[0].split("==")
        for line in read(".ci/constraints.txt").splitlines()
        if not line.startswith("#")
    )
    project = loads(read("pyproject.toml"))
    lists = [project["project"]["dependencies"], *project["dependency-groups"].values()]
    asked = [Requirement(line) for lines in lists for line in lines if isinstance(line, str)]
    known = [requirement for requirement in asked if requirement.name in pins]
    assert len(known) >= 25
    assert [str(one) for one in known if not one.specifier.contains(pins[one.name], prereleases=True)] == []
    assert 'PIP_CONSTRAINT="$PWD/.ci/constraints.txt"' in read(".ci/run")
