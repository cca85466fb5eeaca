"""A model family that only the example's adapter knows: a llama by another name."""

from __future__ import annotations

from mlx_lm.models import llama


class Model(llama.Model):  # type: ignore[misc]
    """A llama."""
