"""The ways a request's caches are used; each compares the paged ones with mlx-lm's own and raises AssertionError."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as mlx_cache
from oracle import (
    COUNT,
    PROMPTS,
    TOLERANCE,
    Run,
    cold,
    difference,
    feed,
    prompt,
    run,
    solo,
    staggered,
    steps_of,
    stock_caches,
)
from tiny import registry

import tinykv_plugin as tinykv
from tinykv_plugin.batching.generator import PagedBatchGenerator
from tinykv_plugin.errors import DraftError

LIMIT = 16


def single(name: str, kv: tinykv.Attachment) -> str:
    """Prompt and decode."""
    for tokens in PROMPTS[:2]:
        same(run(kv.model, tokens, kv.model.make_cache()), solo(name, tuple(tokens)))
    return "yes"


def chunks(name: str, kv: tinykv.Attachment) -> str:
    """A prompt in chunks that end inside pages and windows."""
    found = run(kv.model, PROMPTS[0], kv.model.make_cache(), prefill_step_size=7)
    same(found, solo(name, tuple(PROMPTS[0]), chunk=7))
    return "yes"


def batch(name: str, kv: tinykv.Attachment) -> str:
    """Prompts of different lengths in a batch, joining while others decode: each as if it were alone."""
    for tokens, found in zip(PROMPTS, staggered(PagedBatchGenerator, kv.model), strict=True):
        same(found, solo(name, tuple(tokens)))
    return "yes, one by one" if kv.session.separate else "yes"  # type: ignore[attr-defined]


def fork(name: str, kv: tinykv.Attachment) -> str:
    """A copy and its source go on with different tokens."""
    model = kv.model
    mine = model.make_cache()
    feed(model, mine, prompt(13))
    theirs = copy.deepcopy(mine)
    for caches, chunks in ((mine, [prompt(3, 5)]), (theirs, [prompt(4, 6)]), (mine, [prompt(3, 5), prompt(2, 7)])):
        close(feed(model, caches, chunks[-1]), cold(name, prompt(13), *chunks))
    return "yes"


def trim(name: str, kv: tinykv.Attachment) -> str:
    """Taking back tokens and going on with others, as drafts do; "no" where the caches say they can't."""
    model = kv.model
    caches = model.make_cache()
    feed(model, caches, prompt(17), *[[token] for token in prompt(3, 4)])
    if not mlx_cache.can_trim_prompt_cache(caches):
        recurrent = any(not cache.is_trimmable() for cache in stock_caches(model))
        assert recurrent, "mlx-lm's own caches can be trimmed, but not these"
        return "no"
    assert mlx_cache.trim_prompt_cache(caches, 5) == 5
    close(feed(model, caches, prompt(4, 8)), cold(name, prompt(17)[:15], prompt(4, 8)))
    return "yes"


def drafts(name: str, kv: tinykv.Attachment) -> str:
    """Speculative decoding with a draft that is mostly wrong: the tokens of the target alone.

    "no" where something in the model's caches can't be rewound, and drafts are refused.
    """
    model, draft, count = kv.model, registry.make("llama", seed=11), 3 * COUNT
    loop = sys.modules["mlx_lm.generate"].speculative_generate_step  # as mlx-lm finds it while a model is attached
    try:
        steps = list(loop(mx.array(PROMPTS[1]), model, draft, max_tokens=count))
    except DraftError:
        return "no"
    found = Run([int(token) for token, _, _ in steps], [logprobs for _, logprobs, _ in steps])
    same(found, solo(name, tuple(PROMPTS[1]), count))
    return "yes"


def save(name: str, kv: tinykv.Attachment, folder: Path) -> str:
    """To a file and back, and stock mlx-lm reads the file too; "no" where mlx-lm can't save its own caches."""
    model, path, stock_path = kv.model, folder / "paged.safetensors", folder / "stock.safetensors"
    mine, stock = model.make_cache(), stock_caches(model)
    feed(model, mine, prompt(13))
    feed(model, stock, *([token] for token in prompt(13)))
    expected = cold(name, prompt(13), prompt(3, 5))
    try:
        mlx_cache.save_prompt_cache(str(stock_path), stock)
        stock = mlx_cache.load_prompt_cache(str(stock_path))
    except Exception:
        return "no"
    tinykv.save_prompt_cache(path, mine)
    close(feed(model, tinykv.load_prompt_cache(path, kv=kv), prompt(3, 5)), expected)
    loaded = mlx_cache.load_prompt_cache(str(path))
    close(np.concatenate([feed(model, loaded, [token]) for token in prompt(3, 5)]), expected)
    return "yes"


def max_kv_size(name: str, kv: tinykv.Attachment) -> str:
    """A size limit in the layers with full attention; "-" where there are none."""
    model = kv.model
    if all(line.kind != "full" for line in kv.plan):
        return "-"
    chunk = steps_of(name, 2048)  # what the tokens of a step see of what the limit drops depends on it
    found = run(model, PROMPTS[0], model.make_cache(max_kv_size=LIMIT), 12, prefill_step_size=chunk)
    same(found, run(model, PROMPTS[0], stock_caches(model, LIMIT), 12, prefill_step_size=chunk))
    return "yes"


def quantized(name: str) -> str:
    """Pages of 8-bit numbers: close to those of the model's dtype. "-" where nothing is in pages.

    The first token only: what follows may differ, as it does with mlx-lm's own quantized cache.
    """
    model = registry.make(name, wide=True)
    expected = run(model, PROMPTS[0], stock_caches(model), 1, prefill_step_size=steps_of(name, 2048))
    with tinykv.attach(model, attention="gather", page_size=4, bits=8) as kv:
        if all(line.kind == "dense" for line in kv.plan):
            return "-"
        found = run(model, PROMPTS[0], kv.make_cache(), 1)
        kv.check()
    apart = float(np.abs(np.exp(found.logprobs) - np.exp(expected.logprobs)).max())
    assert apart < 0.3, f"probabilities apart by {apart}"
    return "yes"


PATHS: dict[str, Callable[..., str]] = {
    "single": single,
    "chunks": chunks,
    "batch": batch,
    "fork": fork,
    "trim": trim,
    "drafts": drafts,
    "save": save,
    "max_kv_size": max_kv_size,
}


def same(found: Run, expected: Run) -> None:
    apart = found.difference(expected)
    assert apart < TOLERANCE, f"apart by {apart}: {found.tokens} where {expected.tokens} is right"


def close(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    apart = max(difference(a, b) for a, b in zip(found, expected, strict=True))
    assert apart < TOLERANCE, f"log-probabilities apart by {apart}"
