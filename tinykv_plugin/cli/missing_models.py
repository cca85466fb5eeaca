"""told_in_one_line(): a model that mlx-lm can't find or fetch is one line, not a traceback out of a library."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

from .failures import CommandError
from .patches import replaced


@contextlib.contextmanager
def told_in_one_line() -> Iterator[None]:
    """While the block runs, mlx-lm's loaders raise CommandError for a model that is neither a folder nor fetched."""
    utils: Any = importlib.import_module("mlx_lm.utils")
    own = utils._download

    @wraps(own)
    def download(name: str, *args: Any, **options: Any) -> Path:
        from ..serving.model_lookup import reason_of

        try:
            return Path(own(name, *args, **options))
        except Exception as error:
            raise CommandError(
                f"the model {name} can't be had: there is no such folder, and it can't be fetched: {reason_of(error)}"
            ) from error

    with replaced(utils, "_download", download):
        yield
