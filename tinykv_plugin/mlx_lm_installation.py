"""How mlx-lm comes onto this Python."""

from __future__ import annotations

import sys

_WANTED = "'mlx-lm>=0.32,<0.33'"


def how_to_install() -> str:
    """The command that installs the mlx-lm that is supported.

    It runs on Python 3.10, but its metadata ask for 3.11, so that pip has to be told; what it needs comes with this
    project there.
    """
    more = "" if sys.version_info >= (3, 11) else "--no-deps --ignore-requires-python "
    return f"python -m pip install {more}{_WANTED}"


def not_installed() -> str:
    """What to say where mlx-lm is missing."""
    return f"mlx-lm is not installed: {how_to_install()}"


def without_mlx_lm(error: ModuleNotFoundError) -> bool:
    """Whether mlx-lm, or a part of it, is what couldn't be imported."""
    return (error.name or "").split(".")[0] == "mlx_lm"
