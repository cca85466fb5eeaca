"""The tiny configurations cover mlx-lm's model files."""

from __future__ import annotations

import pytest
from found import Found
from tiny import registry


def test_every_model_file_has_a_configuration_or_a_reason() -> None:
    assert {*registry.model_files()} == {*registry.CONFIGS} | {*registry.UNAVAILABLE}


def test_the_table_has_every_model(found: Found) -> None:
    """If this fails: tox run -e archs -- --write-models"""
    if not found.comparable:
        pytest.skip(f"docs/models.json is of mlx-lm {found.stored.get('mlx_lm')}, not of the one installed")
    assert [*found.stored["models"]] == sorted(registry.NAMES)
    assert found.stored["unavailable"] == registry.UNAVAILABLE
