"""Whole models: the compiled backend against gather and against mlx-lm's own caches, with no copy of a pool."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, generate_step, speculative_generate_step
from mlx_lm.models import gemma3_text, gpt_oss, llama
from mlx_lm.models.cache import trim_prompt_cache

import tinykv_plugin

PROMPTS = ([7] * 3 + list(range(5, 60)), list(range(100, 108)), [3], list(range(1, 120)))
LARGE = 4096  # pages: 8 MiB of keys of a tiny llama


def tiny_llama(dtype: mx.Dtype, layers: int = 2) -> Any:
    arguments = llama.ModelArgs(
        model_type="llama", hidden_size=96, num_hidden_layers=layers, intermediate_size=64, num_attention_heads=6,
        num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=128, head_dim=16,
    )  # fmt: skip
    return _seeded(llama.Model(arguments), dtype)


def tiny_gemma3(dtype: mx.Dtype) -> Any:
    """Windows of 32 tokens in all layers but the last."""
    arguments = gemma3_text.ModelArgs(
        model_type="gemma3_text", hidden_size=64, num_hidden_layers=3, intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=1, head_dim=16, vocab_size=128, sliding_window=32, sliding_window_pattern=3,
    )  # fmt: skip
    return _seeded(gemma3_text.Model(arguments), dtype)


def tiny_gpt_oss(dtype: mx.Dtype) -> Any:
    """Attention sinks, and windows of 16 tokens in every other layer."""
    arguments = gpt_oss.ModelArgs(
        model_type="gpt_oss", num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, vocab_size=128,
        hidden_size=64, intermediate_size=64, head_dim=16, num_attention_heads=4, num_key_value_heads=2,
        sliding_window=16, rope_theta=10000,
    )  # fmt: skip
    return _seeded(gpt_oss.Model(arguments), dtype)


def _seeded(model: Any, dtype: mx.Dtype) -> Any:
    mx.random.seed(0)
    model.apply(lambda x: (mx.random.normal(x.shape) * 0.15 if x.ndim > 1 else mx.ones(x.shape)).astype(dtype))
    mx.eval(model.parameters())
    return model


def tokens(model: Any, prompt: list[int], count: int = 40, **options: Any) -> tuple[list[int], mx.array]:
    """Greedy tokens, and the log probabilities of the last one."""
    steps = list(generate_step(mx.array(prompt), model, max_tokens=count, prefill_step_size=48, **options))
    return [int(token) for token, _ in steps], steps[-1][1].astype(mx.float32)


MODELS: list[Callable[[mx.Dtype], Any]] = [tiny_llama, tiny_gemma3, tiny_gpt_oss]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("page_size", [4, 32])
def test_the_tokens_are_those_of_mlx_lm(make: Any, page_size: int) -> None:
    model = make(mx.float32)
    for prompt in PROMPTS:
        right, right_logprobs = tokens(model, prompt)
        for attention in ("cpu", "gather"):
            with tinykv_plugin.attach(model, attention=attention, page_size=page_size) as kv:
                got, logprobs = tokens(model, prompt)
                assert got == right
                assert mx.abs(logprobs - right_logprobs).max().item() < 1e-3
                assert {line.backend for line in kv.plan} == {attention}
                kv.check()


@pytest.mark.parametrize("make", MODELS[:2])  # mlx has the experts of gpt-oss on CPUs in float32 only
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_types_agree_with_gather(make: Any, dtype: mx.Dtype) -> None:
    """The same tokens are fed to both, as rounding may decide between two equally likely ones."""
    model = make(dtype)
    logits = []
    for attention in ("cpu", "gather"):
        with tinykv_plugin.attach(model, attention=attention):
            cache = model.make_cache()
            model(mx.array([PROMPTS[0]]), cache=cache)
            logits.append(mx.concatenate([model(mx.array([[token]]), cache=cache) for token in PROMPTS[1]], axis=1))
    scale = mx.abs(logits[1]).max()
    assert (mx.abs(logits[0] - logits[1]).max() / scale).item() < 0.06


def test_a_size_limit_keeps_the_first_tokens() -> None:
    model = tiny_llama(mx.float32)
    results = []
    for attention in ("cpu", "gather"):
        with tinykv_plugin.attach(model, attention=attention, max_kv_size=40, page_size=8):
            results.append(tokens(model, PROMPTS[0], 60)[0])
    assert results[0] == results[1]


def test_rows_of_a_batch_are_as_if_alone() -> None:
    """Requests that come and go in a batch: every row's tokens are those it would have had alone."""
    model = tiny_llama(mx.float32)
    right = [tokens(model, prompt, 20)[0] for prompt in PROMPTS]
    with tinykv_plugin.attach(model, attention="cpu", page_size=8) as kv:
        generator = BatchGenerator(model, max_tokens=20, completion_batch_size=3, prefill_batch_size=2)
        uids = generator.insert([list(prompt) for prompt in PROMPTS])
        got: dict[int, list[int]] = {uid: [] for uid in uids}
        finished = 0
        while finished < len(uids):
            _, responses = generator.next()
            for response in responses:
                got[response.uid].append(response.token)
                finished += response.finish_reason is not None
        assert [got[uid] for uid in uids] == right
        kv.check()


def single(model: Any) -> None:
    """A long prompt in pieces, and many steps, evaluated one ahead."""
    tokens(model, list(range(1, 100)) * 6, 300)


def limited(model: Any) -> None:
    """Pages that were left are written again."""
    tokens(model, list(range(1, 100)) * 2, 100, prompt_cache=model.make_cache(40))


def forked(model: Any) -> None:
    cache = model.make_cache()
    tokens(model, PROMPTS[0], 8, prompt_cache=cache)
    for fork in [copy.deepcopy(cache) for _ in range(3)]:
        tokens(model, [5], 40, prompt_cache=fork)


def rewound(model: Any) -> None:
    cache = model.make_cache()
    for _ in range(4):
        tokens(model, PROMPTS[0], 8, prompt_cache=cache)
        trim_prompt_cache(cache, 50)


def drafted(model: Any) -> None:
    """The pool of the draft is watched too."""
    draft = tiny_llama(mx.float32, 1)
    with tinykv_plugin.attach(draft, attention="cpu", page_size=16):
        list(speculative_generate_step(mx.array(PROMPTS[0]), model, draft, max_tokens=40, num_draft_tokens=3))


def together(model: Any) -> None:
    """Rows of a batch join, leave, and share a beginning that was stored."""
    for make in (BatchGenerator, tinykv_plugin.PagedBatchGenerator):
        generator = make(model, max_tokens=20, completion_batch_size=3, prefill_batch_size=2)
        generator.insert([list(prompt) for prompt in PROMPTS * 2])
        finished = 0
        while finished < 2 * len(PROMPTS):
            finished += sum(response.finish_reason is not None for response in generator.next()[1])
        generator.close()


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("path", [single, limited, forked, rewound, drafted, together])
def test_no_pool_is_ever_copied(
    path: Callable[[Any], None], layers: int, monkeypatch: pytest.MonkeyPatch, native: Any
) -> None:
    """One- and two-layer models are where mlx's own writes copy the pool at nearly every asynchronous step."""
    from tinykv_native.backend import CpuBackend

    pools: dict[int, tuple[Any, tuple[int, int]]] = {}
    copies: Counter[str] = Counter()
    sizes: set[int] = set()

    def watched(name: str) -> Callable[..., None]:
        original = getattr(CpuBackend, name)

        def call(self: Any, target: Any, *rest: Any) -> None:
            original(self, target, *rest)
            pages = getattr(target, "pages", target)
            where = native.data_pointer(pages.keys), native.data_pointer(pages.values)
            copies[name] += pools.setdefault(id(pages), (pages, where))[1] != where
            copies["calls"] += 1
            sizes.add(pages.num_pages)

        return call

    for name in ("write", "copy_pages", "resize"):
        monkeypatch.setattr(CpuBackend, name, watched(name))
    model = tiny_llama(mx.float32, layers)
    with tinykv_plugin.attach(model, attention="cpu", page_size=16) as kv:
        pool = kv.session.pools[0]
        pool.allocator.release(pool.allocate(LARGE))  # a copy of one of its arrays can't be overlooked
        gc.collect()
        mx.clear_cache()
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        path(model)
        assert mx.get_peak_memory() - held < kv.session.layers[0].pages.nbytes / 4
        assert max(sizes) >= LARGE
        assert len(pools) == layers + (path is drafted)
        calls = copies.pop("calls")
        assert calls > 20 * layers
        assert +copies == Counter()


def test_a_copied_pool_would_be_counted(native: Any) -> None:
    """The address that is watched is that of the memory: an array that mlx copies has another one."""
    pool = native.resize_pages(None, [4, 1, 16, 8], mx.float32, 8)
    grown = native.resize_pages(pool, [8, 1, 16, 8], mx.float32, 8)
    assert native.data_pointer(grown) == native.data_pointer(pool)
    outgrown = native.resize_pages(pool, [1 << 16, 1, 16, 8], mx.float32, 0)
    written = pool.at[0].add(1.0)  # mlx's own write, with another holder of the array
    mx.eval(written)
    assert len({native.data_pointer(each) for each in (pool, outgrown, written)}) == 3
