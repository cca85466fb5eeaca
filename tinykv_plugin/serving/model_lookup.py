"""require_model(): whether a request's model can be had, found out before the loaded one is given up for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_lm import utils

from .failures import ModelNotFoundError

# What is needed of a model that is only looked at.
CONFIGURATION = ["*.json", "*.py"]


def require_model(name: str, *, trust_remote_code: bool, whole: bool = True) -> None:
    """Raise ModelNotFoundError unless mlx-lm can find the model ``name``, knows its architecture and has its weights.

    Like mlx-lm it takes a folder, or a repository of Hugging Face's, which is fetched (not ``whole``: only what
    describes the model). Loads nothing, so that other requests can go on meanwhile.
    """
    try:
        folder = Path(utils._download(name, allow_patterns=None if whole else CONFIGURATION))
        config = utils.load_config(folder)
        own_code = config.get("model_file")
        if own_code is None:
            utils._get_classes(config=config)
        elif not trust_remote_code:
            raise ValueError(f"it brings code of its own ({own_code}), and the server runs without --trust-remote-code")
        if whole and not any(folder.glob("model*.safetensors")):
            raise FileNotFoundError(f"there is no model*.safetensors in {folder}")
    except Exception as error:
        fetched = "" if Path(name).exists() else "there is no such folder, and it can't be fetched: "
        raise ModelNotFoundError(f"the model {name!r} can't be had: {fetched}{reason_of(error)}") from None


def require_adapter(name: str) -> None:
    """Raise ModelNotFoundError unless ``name`` is a folder with an adapter, as mlx-lm loads them."""
    for file in ("adapter_config.json", "adapters.safetensors"):
        if not (Path(name) / file).is_file():
            raise ModelNotFoundError(f"the adapter {name!r} can't be had: there is no {file} in it")


def reason_of(error: Exception) -> str:
    """Why a model can't be had, in one line: libraries add advice, and repeat themselves."""
    if isinstance(error, KeyError):
        return f"its config.json has no {error}"
    lines: list[Any] = [line.strip() for line in str(error).splitlines() if line.strip()]
    return str(lines[0]) if lines else type(error).__name__
