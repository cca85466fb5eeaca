"""A model without its weights: built from a folder or from config.json alone, nothing read or computed."""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .failures import CommandError

# What mlx-lm raises for a model that it can't build.
BROKEN = (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError)


@dataclass(frozen=True)
class LazyModel:
    """A model whose weights are not in memory.

    ``kind`` is its ``model_type``, ``weights`` their size in bytes, ``context`` the number of tokens it was made for.
    """

    model: Any
    kind: str
    weights: int
    context: int | None


def load_lazily(path: Path, trust_remote_code: bool) -> LazyModel:
    """The model in the folder ``path``, or of the config.json ``path``. Raises CommandError if it can't be built."""
    if path.is_dir():
        folder: contextlib.AbstractContextManager[Path] = contextlib.nullcontext(path)
    elif path.is_file():
        folder = _alone(path)
    else:
        raise CommandError(f"{path} is no folder and no file; give a model's folder or its config.json")
    with folder as place:
        try:
            return _load(place, trust_remote_code)
        except BROKEN as error:
            message = " ".join(str(error).split()).replace(str(place), str(path))
            raise CommandError(f"the model in {path} can't be loaded: {type(error).__name__}: {message}") from error


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(path, Path(folder) / "config.json")
        yield Path(folder)


def _load(folder: Path, trust_remote_code: bool) -> LazyModel:
    utils: Any = importlib.import_module("mlx_lm.utils")
    from mlx.utils import tree_flatten

    with_weights = any(folder.glob("model*.safetensors"))
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise FileNotFoundError(f"there is no config.json in {folder}")
    config = json.loads(config_file.read_text(encoding="utf-8"))
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError("its config.json names no model_type")
    model = utils.load_model(folder, lazy=True, strict=with_weights, trust_remote_code=trust_remote_code)[0]
    if not with_weights:
        _as_configured(model, config)
    leaves: Any = tree_flatten(model.parameters())
    text = config.get("text_config") or {}
    context = config.get("max_position_embeddings") or text.get("max_position_embeddings")
    weights = sum(array.nbytes for _, array in leaves)
    return LazyModel(model, str(config["model_type"]), weights, int(context) if context else None)


def _as_configured(model: Any, config: dict[str, Any]) -> None:
    """Give a model that was made without weights the dtype and the quantization that its configuration names."""
    import mlx.core as mx

    text = config.get("text_config") or {}
    names = (config.get("dtype"), config.get("torch_dtype"), text.get("dtype"), text.get("torch_dtype"))
    name = next((name for name in names if name), "bfloat16")
    model.set_dtype(getattr(mx, name, mx.bfloat16))
    quantization = config.get("quantization")
    if not quantization:
        return
    group_size, bits = quantization["group_size"], quantization["bits"]

    def quantized(place: str, module: Any) -> Any:
        own = quantization.get(place)
        if own is not None:
            return own
        weight = getattr(module, "weight", None)
        return hasattr(module, "to_quantized") and weight is not None and weight.shape[-1] % group_size == 0

    nn: Any = importlib.import_module("mlx.nn")
    nn.quantize(
        model, group_size=group_size, bits=bits, mode=quantization.get("mode", "affine"), class_predicate=quantized
    )
