"""The same prompts with mlx-lm's own caches and with paged ones: what came out, how fast, and what it held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import BatchGenerator, stream_generate
from mlx_lm.models.cache import make_prompt_cache

from ..attachment import Attachment, attach
from ..batching.generator import PagedBatchGenerator
from ..config import KVCacheConfig

CHAT = ("In three sentences, what does a key-value cache do in a language model?",)
SHORT_PROMPTS = (
    "Name three primary colors.",
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "How many days are there in a week?",
    "Name an animal that can fly.",
    "What do bees make?",
)
WARM_UP_TOKENS = 4


@dataclass
class Run:
    """Some prompts done one way. ``waste`` is the share of the held slots that have no token in them.

    ``bytes_used`` is the part of ``bytes_held`` that the requests' tokens take, whole pages counted.
    """

    texts: list[str] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    seconds: float = 0.0
    bytes_held: int = 0
    bytes_used: int = 0
    waste: float = 0.0

    @property
    def generated(self) -> int:
        """Tokens generated for all prompts."""
        return sum(len(tokens) for tokens in self.tokens)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second; 0 if nothing was measured."""
        return self.generated / self.seconds if self.seconds else 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        """Prompt tokens a second; 0 if nothing was measured."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0


@dataclass(frozen=True)
class Comparison:
    """One set of prompts, done both ways."""

    title: str
    prompts: Sequence[str]
    dense: Run
    paged: Run

    @property
    def equal(self) -> bool:
        """Whether every token is the same."""
        return self.dense.tokens == self.paged.tokens


def compare(
    model: Any,
    tokenizer: Any,
    config: KVCacheConfig,
    max_tokens: int,
    advance: Callable[[int], None] = lambda tokens: None,
) -> list[Comparison]:
    """Run every set of prompts dense, then paged. ``advance`` is called with the tokens done since its last call.

    ``model`` is attached with ``config`` for the second half and detached at the end.
    """
    sets = [("one chat", CHAT), (f"a batch of {len(SHORT_PROMPTS)}", SHORT_PROMPTS)]

    def run_all(kv: Attachment | None) -> list[Run]:
        run_prompts(model, tokenizer, CHAT, WARM_UP_TOKENS, kv)
        return [
            run_prompts(model, tokenizer, CHAT, max_tokens, kv, advance),
            run_batch(model, tokenizer, SHORT_PROMPTS, max_tokens, kv, advance),
        ]

    dense = run_all(None)
    with attach(model, config) as kv:
        paged = run_all(kv)
    return [Comparison(title, prompts, *runs) for (title, prompts), *runs in zip(sets, dense, paged, strict=True)]


def tokens_to_do(max_tokens: int) -> int:
    """What the calls of ``advance`` add up to."""
    return 2 * max_tokens * (len(CHAT) + len(SHORT_PROMPTS))


def run_prompts(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    max_tokens: int,
    kv: Attachment | None,
    advance: Callable[[int], None] = lambda tokens: None,
) -> Run:
    """Generate for one prompt after the other, greedily, and keep all their caches to the end, as a server would."""
    run = Run()
    caches = [make_prompt_cache(model) for _ in prompts]
    for prompt, cache in zip(prompts, caches, strict=True):
        response = None
        text, tokens = "", []
        encoded = _encode(tokenizer, prompt)
        for response in stream_generate(model, tokenizer, encoded, max_tokens=max_tokens, prompt_cache=cache):
            text += response.text
            tokens.append(int(response.token))
            advance(1)
        advance(max_tokens - len(tokens))
        run.texts.append(text.strip())
        run.tokens.append(tokens)
        if response is not None:
            run.prompt_tokens += response.prompt_tokens
            run.prompt_seconds += response.prompt_tokens / response.prompt_tps
            run.seconds += response.generation_tokens / response.generation_tps
    _measure(run, caches, kv)
    return run


def run_batch(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    max_tokens: int,
    kv: Attachment | None,
    advance: Callable[[int], None] = lambda tokens: None,
) -> Run:
    """Generate for all prompts together, greedily; what the batch holds is measured when it holds most."""
    run = Run(tokens=[[] for _ in prompts])
    make: Callable[..., Any] = BatchGenerator if kv is None else PagedBatchGenerator
    generator = make(model, max_tokens=max_tokens, stop_tokens=[[token] for token in tokenizer.eos_token_ids])
    uids = generator.insert([_encode(tokenizer, prompt) for prompt in prompts])
    with generator.stats() as stats:
        while responses := generator.next_generated():
            for response in responses:
                tokens = run.tokens[uids.index(response.uid)]
                tokens.append(int(response.token))
                advance(1)
                if response.finish_reason is not None:
                    advance(max_tokens - len(tokens))
            _measure_batch(run, generator, kv)
    generator.close()
    ends = set(tokenizer.eos_token_ids)
    run.texts = [tokenizer.decode([token for token in tokens if token not in ends]).strip() for tokens in run.tokens]
    run.prompt_tokens, run.prompt_seconds = stats.prompt_tokens, stats.prompt_time
    run.seconds = stats.generation_time
    return run


def _measure_batch(run: Run, generator: Any, kv: Attachment | None) -> None:
    """Note what the batch holds if it is more than before."""
    batch = generator._generation_batch
    held = generator.prompt_cache_nbytes if kv is None else kv.stats().bytes_used
    if not len(batch) or held <= run.bytes_used:
        return
    run.bytes_used = run.bytes_held = held
    if kv is not None:
        stats = kv.stats()
        run.bytes_held, run.waste = stats.bytes_reserved, stats.waste
        return
    lengths = [cache.keys.shape[2] for cache in batch.prompt_cache if getattr(cache, "keys", None) is not None]
    if lengths:
        run.waste = 1 - sum(map(len, batch.tokens)) / (len(batch) * max(lengths))


def _encode(tokenizer: Any, prompt: str) -> list[int]:
    if tokenizer.has_chat_template:
        messages = [{"role": "user", "content": prompt}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    return list(tokenizer.encode(prompt))


def _measure(run: Run, caches: Sequence[Sequence[Any]], kv: Attachment | None) -> None:
    """Note what the caches hold while they are still there."""
    if kv is None:
        leaves = [leaf for cache in caches for entry in cache for leaf in getattr(entry, "caches", [entry])]
        run.bytes_held = run.bytes_used = sum(leaf.nbytes for leaf in leaves)
        keys = [(leaf.keys.shape[2], leaf.offset) for leaf in leaves if getattr(leaf, "keys", None) is not None]
        slots = sum(length for length, _ in keys)
        run.waste = 1 - sum(min(length, tokens) for length, tokens in keys) / slots if slots else 0.0
        return
    stats = kv.stats()
    kept_dense = [line.layer for line in kv.plan if line.kind == "dense"]
    others = sum(cache[layer].nbytes for cache in caches for layer in kept_dense)
    run.bytes_held = stats.bytes_reserved + others
    run.bytes_used = stats.bytes_used + others
    run.waste = stats.waste
