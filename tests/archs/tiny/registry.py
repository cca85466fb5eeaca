"""Every model file of mlx-lm with its tiny configuration, and models made from them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
import sys
import types
from collections.abc import Iterator
from inspect import signature
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import pytest

from . import experts, hybrid, latent, llama_like, muse_kernels, window
from .base import BASE, Config

FAMILIES: dict[str, dict[str, Config]] = {
    "plain attention": llama_like.CONFIGS,
    "mixture of experts": experts.CONFIGS,
    "sliding window or chunks": window.CONFIGS,
    "latent attention (MLA) or indexer": latent.CONFIGS,
    "attention and recurrent layers": hybrid.CONFIGS,
    "recurrent only": hybrid.RECURRENT,
}

CONFIGS: dict[str, Config] = {name: config for family in FAMILIES.values() for name, config in family.items()}
# What the installed version of mlx-lm has of them.
FILES = {info.name for info in pkgutil.iter_modules(mlx_lm.models.__path__)}
NAMES = sorted(set(CONFIGS) & FILES, key=str.lower)


def family_of(name: str) -> str:
    return next(family for family, configs in FAMILIES.items() if name in configs)


def model_files() -> list[str]:
    """The modules of ``mlx_lm.models`` that define a model."""
    return [
        info.name
        for info in pkgutil.iter_modules(mlx_lm.models.__path__)
        if hasattr(module_of(info.name), "ModelArgs") and hasattr(module_of(info.name), "Model")
    ]


def module_of(name: str) -> Any:
    if name == "olmo":
        sys.modules.setdefault("hf_olmo", types.ModuleType("hf_olmo"))  # asked for at import, and not used
    module = importlib.import_module(f"mlx_lm.models.{name}")
    if name == "muse_spark":
        muse_kernels.use_plain(module)
    return module


def make(name: str, seed: int = 3, *, wide: bool = False, **fields: Any) -> Any:
    """A new model with random weights, ``fields`` of its configuration changed; ``wide`` as :func:`widened`.

    The weights are perturbed, as fresh ones give nearly the same token everywhere.
    """
    module = module_of(name)
    config = {"model_type": name} | BASE | CONFIGS[name] | fields
    if wide:
        config = widened(config) | WIDE.get(name, {})
    mx.random.seed(seed)
    with _linear_layers(module):
        model = module.Model(module.ModelArgs.from_dict(config))
    if name == "phi3small":
        model._dummy_tokenizer_ids = mx.array([], dtype=mx.int32)  # its own lie far past a tiny vocabulary
    model.set_dtype(mx.float32)
    model.apply(_perturb)
    mx.eval(model.parameters())
    model.eval()
    return model


def _factors(count: int) -> Config:
    return {"long_factor": [1.0] * count, "short_factor": [1.0] * count}


# What grows in a wide model: mlx quantizes in groups of 32 elements at least.
_WIDTHS = {
    "block_dim": 2,
    "d_model": 2,
    "global_head_dim": 2,
    "head_dim": 2,
    "hidden_dim": 2,
    "hidden_size": 2,
    "hidden_size_per_head": 2,
    "index_head_dim": 2,
    "kv_channels": 2,
    "kv_lora_rank": 2,
    "model_dim": 2,
    "n_embd": 2,
    "qk_nope_head_dim": 2,
    "qk_rope_head_dim": 4,
    "swa_head_dim": 2,
    "swa_v_head_dim": 2,
    "v_head_dim": 2,
}


WIDE: dict[str, Config] = {
    "minicpm3": {"rope_scaling": {**latent.CONFIGS["minicpm3"]["rope_scaling"], **_factors(16)}},
    "phimoe": {"rope_scaling": {**experts.CONFIGS["phimoe"]["rope_scaling"], **_factors(16)}},
}


def widened(config: Config) -> Config:
    """``config`` with heads of 32 elements at least."""
    return {
        key: widened(value) if isinstance(value, dict) else value * _WIDTHS.get(key, 1) if type(value) is int else value
        for key, value in config.items()
    }


def quantizable(part: Any) -> bool:
    """Whether ``nn.quantize`` can quantize a module's weights in groups of 32."""
    function = getattr(part, "to_quantized", None)
    return function is not None and "mode" in signature(function).parameters and part.weight.shape[-1] % 32 == 0


@functools.lru_cache(maxsize=2)
def shared(name: str) -> Any:
    """The same model for tests of one architecture that follow each other; they must not change it."""
    return make(name)


class _PlainLinear(nn.Linear):
    """Stands in for bitnet's linear layer, which is a Metal kernel; caches don't depend on it."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True, **_: Any) -> None:
        super().__init__(inputs, outputs, bias)


@contextlib.contextmanager
def _linear_layers(module: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(module, "BitLinear"):
            patch.setattr(module, "BitLinear", _PlainLinear)
        yield


def _perturb(weight: mx.array) -> mx.array:
    if weight.ndim < 2 or weight.dtype != mx.float32:
        return weight
    return weight + 0.3 * mx.random.normal(weight.shape)
