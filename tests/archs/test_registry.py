"""The tiny configurations cover mlx-lm's model files."""

from __future__ import annotations

import pytest
from found import Found
from tiny import registry


def test_every_model_file_has_a_configuration(found: Found) -> None:
    """Another version of mlx-lm may have fewer, but none that nobody has thought of."""
    assert {*registry.model_files()} <= {*registry.CONFIGS}
    assert {*registry.model_files()} == {*registry.CONFIGS} or not found.comparable


def test_the_table_has_every_model(found: Found) -> None:
    """If this fails: tox run -e archs -- --write-models"""
    if not found.comparable:
        pytest.skip(f"docs/models.json is of mlx-lm {found.stored.get('mlx_lm')}, not of the one installed")
    assert [*found.stored["models"]] == sorted(registry.NAMES)
