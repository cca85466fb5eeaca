"""What paged caches must equal: the same model with mlx-lm's own caches, one request at a time, greedily."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import cache as mlx_cache
from tiny import registry

Array = npt.NDArray[np.float32]

VOCABULARY = 97
COUNT = 8
# Tokens of the prompts that join each other in a batch.
LENGTHS = (21, 5, 12)
# Of log-probabilities in float32: the order of sums differs between one row and several, and between backends.
TOLERANCE = 2e-3


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids, different for each seed from the first token on."""
    return [(5 * i + 7 * seed + i * i * (seed + 1)) % VOCABULARY for i in range(length)]


PROMPTS = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]


def stock_caches(model: Any, max_kv_size: int | None = None) -> list[Any]:
    """mlx-lm's own caches; with a size limit in the plain layers if ``max_kv_size`` is given."""
    own = getattr(type(model), "make_cache", None)
    caches = list(own(model)) if own else [mlx_cache.KVCache() for _ in model.layers]
    if type(model).__module__.endswith(".plamo3"):
        # Its masks look back one token further than its caches, so that what a token sees depends on the chunks.
        for cache in caches:
            if type(cache) is mlx_cache.RotatingKVCache:
                cache.max_size += 1
    return caches if max_kv_size is None else [limited(cache, max_kv_size) for cache in caches]


def limited(cache: Any, max_kv_size: int) -> Any:
    """``cache`` with a size limit where it keeps everything, as mlx-lm makes one for a model without ``make_cache``."""
    if type(cache) is mlx_cache.CacheList:
        return mlx_cache.CacheList(*(limited(part, max_kv_size) for part in cache.caches))
    return mlx_cache.RotatingKVCache(max_kv_size, keep=4) if type(cache) is mlx_cache.KVCache else cache


def steps_of(name: str, tokens: int) -> int:
    """The most tokens of a prompt at once for which mlx-lm is right.

    phi3small's sparse layers let the tokens of one step see each other, whichever comes first; olmo's attention fails
    with the mask of more than one.
    """
    return 1 if name in ("olmo", "phi3small") else tokens


class Run:
    """A greedy run: its tokens, and the log-probabilities ``(tokens, vocabulary)`` each was taken from."""

    def __init__(self, tokens: Sequence[int], logprobs: Sequence[mx.array]) -> None:
        self.tokens = list(tokens)
        self.logprobs: Array = np.array(mx.stack([one.reshape(-1).astype(mx.float32) for one in logprobs]))
        assert np.isfinite(self.logprobs).all(), "a tiny model that overflows compares nothing"

    def difference(self, other: Run) -> float:
        """The largest difference of log-probabilities over the steps with the same history.

        Infinite where the tokens part although one of them was clearly likelier: a tie may go either way.
        """
        assert len(self.tokens) == len(other.tokens), (self.tokens, other.tokens)
        largest = 0.0
        for mine, theirs, a, b in zip(self.tokens, other.tokens, self.logprobs, other.logprobs, strict=True):
            largest = max(largest, difference(a, b))
            if mine != theirs:
                return largest if abs(float(a[mine] - a[theirs])) < 5 * TOLERANCE else float("inf")
        return largest


def difference(a: Array, b: Array) -> float:
    """The largest difference of log-probabilities among likelier tokens: in the others rounding is magnified."""
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(np.abs(a - b)[a > a.max() - 15].max())


def run(model: Any, tokens: Sequence[int], caches: list[Any], count: int = COUNT, **options: Any) -> Run:
    """Greedy generation by mlx-lm's own loop."""
    steps = list(generate_step(mx.array(tokens), model, max_tokens=count, prompt_cache=caches, **options))
    return Run([int(token) for token, _ in steps], [logprobs for _, logprobs in steps])


@functools.lru_cache(maxsize=64)
def solo(name: str, tokens: tuple[int, ...], count: int = COUNT, chunk: int = 2048) -> Run:
    """The reference: a prompt alone, in mlx-lm's own caches."""
    model = registry.shared(name)
    return run(model, tokens, stock_caches(model), count, prefill_step_size=steps_of(name, chunk))


def feed(model: Any, caches: list[Any], *chunks: Sequence[int]) -> Array:
    """Run the model on ``chunks`` one after the other; the log-probabilities after every token of the last."""
    for tokens in chunks:
        logits = model(mx.array([list(tokens)]), cache=caches)
        mx.eval(logits, [cache.state for cache in caches])
    logits = logits[0].astype(mx.float32)
    found: Array = np.array(logits - mx.logsumexp(logits, -1, keepdims=True))
    assert np.isfinite(found).all(), "a tiny model that overflows compares nothing"
    return found


def cold(name: str, *chunks: Sequence[int]) -> Array:
    """:func:`feed` with new caches of mlx-lm's own."""
    model = registry.shared(name)
    caches = stock_caches(model)
    if steps_of(name, 2) == 1:
        *before, last = chunks
        for tokens in before:
            feed(model, caches, *([token] for token in tokens))
        return np.concatenate([feed(model, caches, [token]) for token in last])
    return feed(model, caches, *chunks)


def staggered(kind: type[BatchGenerator], model: Any, **options: Any) -> list[Run]:
    """All :data:`PROMPTS` in one batch; the last two join after the first has generated three tokens."""
    generator = kind(model, max_tokens=COUNT, prefill_step_size=16, **options)
    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[mx.array]] = {}
    try:
        first, *others = PROMPTS
        uids = generator.insert([first])
        while responses := generator.next_generated():
            for response in responses:
                if (error := getattr(response, "error", None)) is not None:
                    raise error
                tokens.setdefault(response.uid, []).append(int(response.token))
                logprobs.setdefault(response.uid, []).append(response.logprobs)
            if len(uids) == 1 and len(tokens[uids[0]]) >= 3:
                uids += generator.insert(others)
    finally:
        generator.close()
    return [Run(tokens[uid], logprobs[uid]) for uid in uids]
