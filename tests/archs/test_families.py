"""Adapters and what belongs to each: an entry point, a test file, a tox factor, rows in the table of models."""

from __future__ import annotations

import configparser
import importlib
import re
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from found import Found

from tinykv_adapters.family import FamilyAdapter
from tinykv_plugin.manager import ENTRY_POINT_GROUP, default_manager

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    point.name
    for point in entry_points(group=ENTRY_POINT_GROUP)
    if point.value.startswith("tinykv_adapters.") and point.name != "general"
)


def adapters_of(module: str) -> list[FamilyAdapter]:
    found: list[FamilyAdapter] = importlib.import_module(f"tinykv_adapters.{module}").tinykv_model_adapters()
    return found


def test_a_model_file_has_one_adapter() -> None:
    count = Counter(name for module in MODULES for adapter in adapters_of(module) for name in adapter.models)
    assert [name for name, number in count.items() if number > 1] == []


@pytest.mark.parametrize("module", MODULES)
def test_an_adapter_has_what_belongs_to_it(module: str, found: Found) -> None:
    (adapter,) = adapters_of(module)
    assert adapter.name == module.replace("_", "-")
    assert (Path(__file__).parent / f"test_{module}.py").exists()
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    factors = re.split(r"[,\s:]+", tox["testenv"]["commands"])
    assert module in factors
    assert set(adapter.models) & set(factors), "the tests of one of its models"
    rows = {name for name, row in found.stored["models"].items() if row["adapter"] == adapter.name}
    # glm4_moe's class is solar_open's too: the rows are of files, adapters go by the class.
    assert rows == set(adapter.models)


def test_an_adapter_of_another_distribution_is_asked_first() -> None:
    names = [plugin.name for plugin in default_manager().plugins if plugin.distribution == "tinykv-plugin"]
    assert "general" in names and set(MODULES) <= set(names)
    points = list(default_manager().hook.tinykv_model_adapters.get_hookimpls())
    assert points[0].plugin_name == "general", "asked last"
