"""Adapters and what belongs to each: an entry point, a test file, a tox factor, rows in the table of models."""

from __future__ import annotations

import configparser
import importlib
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from found import Found
from tiny import registry

from tinykv_adapters.family import FamilyAdapter
from tinykv_plugin.manager import ENTRY_POINT_GROUP, default_manager

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    point.name
    for point in entry_points(group=ENTRY_POINT_GROUP)
    if point.value.startswith("tinykv_adapters.") and point.name != "general"
)
# What all adapters have in common; the general one is for models of no family.
COMMON = {"__init__", "family", "general"}
TOX = configparser.ConfigParser(interpolation=None)
TOX.read(ROOT / "tox.ini", encoding="utf-8")
FACTORS = {
    factor
    for line in TOX["testenv"]["commands"].splitlines()
    if "--model {env_name}" in line
    for factor in line.partition(":")[0].split(", ")
}


def adapters_of(module: str) -> list[FamilyAdapter]:
    found: list[FamilyAdapter] = importlib.import_module(f"tinykv_adapters.{module}").tinykv_model_adapters()
    return found


def test_a_model_file_has_one_adapter() -> None:
    count = Counter(name for module in MODULES for adapter in adapters_of(module) for name in adapter.models)
    assert [name for name, number in count.items() if number > 1] == []


def test_every_module_of_adapters_is_an_entry_point() -> None:
    files = {path.stem for path in (ROOT / "adapters" / "tinykv_adapters").glob("*.py")}
    assert files - COMMON == {*MODULES}


def test_the_factors_of_tox_are_models_of_every_family_and_adapters() -> None:
    models = FACTORS - {*MODULES}
    assert models <= {*registry.CONFIGS} and len(models) >= 24
    assert {registry.family_of(name) for name in models} == {*registry.FAMILIES}
    assert FACTORS - models == {*MODULES}


def test_all_but_latent_attention_and_an_indexer_are_read_directly(found: Found) -> None:
    gathered = {
        name
        for name, row in found.stored["models"].items()
        if any(attention.startswith("gather") for attention in row["attention"])
    }
    models = [adapter.models for module in MODULES for adapter in adapters_of(module)]
    latent = {name for family in models for name, expected in family.items() if expected.latent}
    assert gathered and gathered <= latent | {"minimax_m3_vl"}


@pytest.mark.parametrize("module", MODULES)
def test_an_adapter_has_what_belongs_to_it(module: str, found: Found) -> None:
    (adapter,) = adapters_of(module)
    assert adapter.name == module.replace("_", "-")
    assert (Path(__file__).parent / f"test_{module}.py").exists()
    assert module in FACTORS
    assert set(adapter.models) & FACTORS, "the tests of one of its models"
    assert f"\n| `{adapter.name}` | " in (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
    rows = {name for name, row in found.stored["models"].items() if row["adapter"] == adapter.name}
    # glm4_moe's class is solar_open's too: the rows are of files, adapters go by the class.
    assert rows == set(adapter.models)


def test_an_adapter_of_another_distribution_is_asked_first() -> None:
    names = [plugin.name for plugin in default_manager().plugins if plugin.distribution == "tinykv-plugin"]
    assert "general" in names and set(MODULES) <= set(names)
    points = list(default_manager().hook.tinykv_model_adapters.get_hookimpls())
    assert points[0].plugin_name == "general", "asked last"
