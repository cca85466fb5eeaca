"""Quantized pages: the same tokens as mlx-lm's own caches whose K and V were rounded in the same way."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from models import batched, greedy, largest_difference, logits, make, prompt, shared
from open_pages import CALLS, OTHERS, PROMPTS, errors
from rounding import generated, open_pages, placed, rounded

import tinykv_plugin as tinykv
from tinykv_plugin.batching.generator import PagedBatchGenerator
from tinykv_plugin.cache import PagedKVCache
from tinykv_plugin.errors import CacheStateError, ConfigError
from tinykv_plugin.kv_format import Affine, KVFormat
from tinykv_plugin.manager import default_manager
from tinykv_plugin.pages import LayerSpec

WIDE = {"head_dim": 32, "num_hidden_layers": 2}
FIELDS: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "gemma3_text": WIDE,
    "gpt_oss": WIDE,
    "gemma2": WIDE | {"query_pre_attn_scalar": 32},
    "qwen3_next": WIDE,
    "deepseek_v3": {"kv_lora_rank": 32, "qk_rope_head_dim": 32, "num_hidden_layers": 2},
}
EIGHT = {"bits": 8, "group_size": 32}
MIXED = {"key_bits": 8, "value_bits": 4}


def wide(kind: str) -> Any:
    """A tiny model whose heads have as many elements as a group."""
    return shared(kind, **FIELDS[kind])


def bits_of(fields: dict[str, Any]) -> tuple[int, int]:
    return fields.get("key_bits", fields.get("bits")), fields.get("value_bits", fields.get("bits"))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize(("bits", "group_size"), [(8, 64), (6, 32), (5, 32), (4, 128), (4, 32)])
def test_a_row_is_what_mlx_packs(bits: int, group_size: int, dtype: mx.Dtype) -> None:
    x = mx.random.normal((2, 3, 5, 128)).astype(dtype)
    packing = Affine(bits, group_size)
    rows = packing.encode(x)
    quantized = mx.quantize(x, group_size=group_size, bits=bits)
    assert rows.dtype == mx.uint32
    assert rows.shape == (2, 3, 5, packing.words(128, dtype))
    assert rows.nbytes == sum(part.nbytes for part in quantized)
    for mine, theirs in zip(packing.split(rows, 128, dtype), quantized, strict=True):
        assert mine.dtype == theirs.dtype
        assert mx.array_equal(mine, theirs)
    assert mx.array_equal(packing.decode(rows, 128, dtype), mx.dequantize(*quantized, group_size, bits))


def test_logits_are_those_of_mlx_lms_quantized_cache() -> None:
    model = wide("llama")
    stock = [mlx_cache.QuantizedKVCache(group_size=32, bits=8) for _ in model.layers]
    exact = logits(model, prompt(40), make_prompt_cache(model))
    expected = logits(model, prompt(40), stock)
    assert largest_difference(expected, exact) > 0.01
    with tinykv.attach(model, page_size=4, bits=8) as kv:
        assert largest_difference(logits(model, prompt(40), make_prompt_cache(model)), expected) < 1e-3
        assert kv.plan[0].storage == "8 bits in groups of 32"
        assert [group.name for group in kv.groups] == ["full"]


@pytest.mark.parametrize("attention", ["auto", "gather"])
def test_few_bits_are_not_rounded_in_the_page_being_filled(attention: str) -> None:
    model = wide("llama")
    closed = logits(model, prompt(40), rounded(model, 4, 4))
    with open_pages(model, 4, 4, page_size=8):
        expected = logits(model, prompt(40), placed(model))
    assert largest_difference(expected, closed) > 0.1
    with tinykv.attach(model, page_size=8, bits=4, attention=attention) as kv:
        assert largest_difference(logits(model, prompt(40), make_prompt_cache(model)), expected) < 1e-4
        assert kv.plan[0].storage == "4 bits in groups of 32"
        kept, opened = kv.groups
        assert (opened.name, opened.open, opened.token_bytes) == ("open", True, 0)
        assert opened.page_bytes == 8 * kept.model_token_bytes


@pytest.mark.parametrize("name", [*CALLS, *PROMPTS, *OTHERS])
def test_gathered_open_pages(name: str) -> None:
    assert max(errors(default_manager().gather(), {**CALLS, **PROMPTS, **OTHERS}[name])) < 2e-5


@pytest.mark.parametrize("bits", [8, 6, 5, 4])
def test_pages_hold_the_bits_that_mlx_lms_quantized_cache_holds(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both are read in one way, as gather does without open pages, nothing differs in any layer."""
    monkeypatch.setattr(KVFormat, "opens", False)

    def dequantized(queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, **packing: int) -> mx.array:
        keys, values = (mx.dequantize(*side, **packing) for side in (keys, values))
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)

    monkeypatch.setattr(base, "quantized_scaled_dot_product_attention", dequantized)
    model = wide("llama")
    stock = [mlx_cache.QuantizedKVCache(group_size=32, bits=bits) for _ in model.layers]
    expected = [logits(model, tokens, stock) for tokens in (prompt(40), [5], [6])]
    with tinykv.attach(model, page_size=4, bits=bits, attention="gather"):
        cache = make_prompt_cache(model)
        for tokens, theirs in zip((prompt(40), [5], [6]), expected, strict=True):
            assert mx.array_equal(logits(model, tokens, cache), theirs)
        for mine, theirs in zip(cache, stock, strict=True):
            sides = zip(mine.keys_and_values(), theirs.keys_and_values(), strict=True)
            assert all(mx.array_equal(side, mx.dequantize(*packed, 32, bits)) for side, packed in sides)


@pytest.mark.parametrize(
    ("fields", "attention"),
    [(EIGHT, "auto"), (MIXED, "auto"), (MIXED, "gather"), ({"value_bits": 6, "bits": 5}, "auto")],
    ids=str,
)
@pytest.mark.parametrize("kind", FIELDS)
def test_r45_r46_every_kind_of_attention(kind: str, fields: dict[str, Any], attention: str) -> None:
    """Full, sliding windows (R45), sinks (R46), softcap, hybrid and MLA."""
    model = wide(kind)
    keys, values = bits_of(fields)
    if kind == "gemma2" and min(keys, values) < 8:
        # It computes attention itself, so that mlx-lm's can't be changed under it; the calls are compared above.
        with tinykv.attach(model, page_size=4, attention="gather", **fields):
            expected = greedy(model, prompt(21), 10)
    else:
        expected = generated(model, prompt(21), 10, (keys, values), 4)
    with tinykv.attach(model, page_size=4, attention=attention, **fields) as kv:
        for step in (2048, 5):
            assert greedy(model, prompt(21), 10, prefill_step_size=step) == expected, step
        kv.check()


@pytest.mark.parametrize("fields", [EIGHT, MIXED], ids=str)
def test_r45_a_size_limit(fields: dict[str, Any]) -> None:
    model = wide("llama")
    for length in (10, 40):
        expected = generated(model, prompt(length), 40, bits_of(fields), 4, max_kv_size=16)
        with tinykv.attach(model, page_size=4, max_kv_size=16, **fields) as kv:
            assert greedy(model, prompt(length), 40) == expected
            kv.check()


def test_r46_eight_bits_with_sinks_are_close_to_full_precision() -> None:
    model = wide("gpt_oss")
    exact = logits(model, prompt(24), make_prompt_cache(model))
    with tinykv.attach(model, page_size=4, bits=8):
        got = logits(model, prompt(24), make_prompt_cache(model))
    # Now and then a rounding sends a token to another expert: not all tokens can be close.
    far = mx.sort(mx.abs(got - exact).max(axis=1))
    assert float(far[12]) < 0.05 * float(mx.abs(exact).max())


def test_results_do_not_depend_on_chunks() -> None:
    model = wide("llama")
    with tinykv.attach(model, page_size=4, bits=4):
        whole = logits(model, prompt(30), make_prompt_cache(model))
        for cuts in ((0, 1, 30), (0, 7, 8, 20, 30), range(31)):
            cache = make_prompt_cache(model)
            parts = [logits(model, prompt(30)[a:b], cache) for a, b in itertools.pairwise(cuts)]
            assert largest_difference(mx.concatenate(parts), whole) < 2e-4


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_r48_rows_of_a_batch_get_what_they_get_alone(kind: str) -> None:
    model = wide(kind)
    prompts = [prompt(length, seed) for seed, length in enumerate((17, 4, 30, 9))]
    solo = [generated(model, tokens, 10, (8, 4), 4) for tokens in prompts]
    with tinykv.attach(model, page_size=4, **MIXED) as kv:
        assert batched(model, prompts, 10) == solo
        kv.check()
        assert kv.stats().pages_used == 0


@pytest.mark.parametrize(
    ("kind", "bits", "start"),
    [("llama", 8, 0), ("llama", 4, 0), ("llama", 4, 26), ("gemma3_text", 8, 0), ("gemma3_text", 4, 0)],
)
def test_preempted_rows_get_what_they_get_alone(kind: str, bits: int, start: int) -> None:
    model = wide(kind)
    prompts = [prompt(length, seed) for seed, length in enumerate((17, 24, 30, 9))]
    solo = [generated(model, tokens, 20, (bits, bits), 4, start=start) for tokens in prompts]
    with tinykv.attach(model, page_size=4, max_pages=22, bits=bits, quantized_start=start) as kv:
        generator = PagedBatchGenerator(model, max_tokens=20)
        ids = generator.insert(prompts)
        found: dict[int, list[int]] = {one: [] for one in ids}
        while responses := generator.next_generated():
            for response in responses:
                found[response.uid].append(int(response.token))
        assert generator.counts.preempted > 0
        assert [found[one] for one in ids] == solo
        del generator
        kv.check()


def test_forks_and_rewinds_into_a_page() -> None:
    model = wide("llama")
    with tinykv.attach(model, page_size=8, bits=4) as kv:
        first = make_prompt_cache(model)
        logits(model, prompt(21), first)
        stored = [layer.keys_and_values() for layer in first]
        fork = copy.deepcopy(first)
        assert trim_prompt_cache(fork, 3) == 3
        forked = greedy(model, [5, 6], 12, cache=fork)
        assert forked == greedy(model, [*prompt(21)[:18], 5, 6], 12)
        assert kv.stats().cow_copies > 0
        for layer, before in zip(first, stored, strict=True):
            assert all(mx.array_equal(a, b) for a, b in zip(layer.keys_and_values(), before, strict=True))
        assert greedy(model, [7], 12, cache=first) == greedy(model, [*prompt(21), 7], 12)


@pytest.mark.parametrize(
    ("fields", "row"),
    [(EIGHT, 32 + 8), ({"bits": 4}, 16 + 8), ({"bits": 6}, 24 + 8), ({"key_bits": 4}, (16 + 8 + 128) / 2)],
    ids=str,
)
def test_r70_pages_have_the_bytes_that_were_asked_for(fields: dict[str, Any], row: float) -> None:
    model = wide("llama")
    with tinykv.attach(model, page_size=4, rewind=4, **fields) as kv:
        cache = make_prompt_cache(model)
        logits(model, prompt(20), cache)
        stats = kv.stats()
        assert stats.bytes_per_token == 2 * 2 * 2 * row, "layers, kv heads, K and V"
        kept, *opened = kv.groups
        assert kept.page_bytes == 4 * stats.bytes_per_token
        assert kept.model_token_bytes == 2 * 2 * 2 * 32 * 4
        # What a rewind of 4 tokens may lead back into is there in full precision, too.
        assert stats.bytes_used == 20 * stats.bytes_per_token + 4 * sum(group.model_token_bytes for group in opened)
        assert sum(layer.nbytes for layer in cache) == 20 * stats.bytes_per_token
        stores = [store for layer in cache for store in (layer._layer.pages, layer._layer.pages.open) if store]
        assert sum(one.keys.nbytes + one.values.nbytes for one in stores) == stats.bytes_reserved


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_stored_prompts_are_found_in_their_own_format(kind: str, tmp_path: Path) -> None:
    model = wide(kind)
    tokens = prompt(24)

    def run(bits: int) -> tuple[int, list[int]]:
        """Tokens found in the folder, and what is generated after the prompt."""
        with tinykv.attach(model, page_size=4, bits=bits, prefix_dir=str(tmp_path), prefix_interval=4) as kv:
            cache, rest = kv.prefix_cache.fetch(tokens)
            logits(model, rest, cache)
            kv.prefix_cache.insert(tokens, cache)
            kv.prefix_cache.flush()
            found = greedy(model, [7], 8, cache=cache)
            del cache
            kv.check()
            return len(tokens) - len(rest), found

    cold = run(8)
    assert cold[0] == 0
    assert run(4)[0] == 0, "pages of another format are other pages"
    warm = run(8)
    assert warm[0] >= 16
    assert warm[1] == cold[1]


def test_the_format_is_one_hashable_value_of_the_pools() -> None:
    model = wide("llama")
    formats = set()
    for fields in ({}, EIGHT, {"bits": 8}, MIXED, {"key_bits": 8, "value_bits": 8}):
        with tinykv.attach(model, **fields) as kv:
            formats |= {pool.kv_format for pool in kv.session.pools}  # type: ignore[attr-defined]
    assert formats == {KVFormat(), KVFormat(8, 8, 32), KVFormat(8, 8), KVFormat(8, 4)}


@pytest.mark.parametrize(
    ("fields", "settings", "message"),
    [
        ({"head_dim": 80}, {"bits": 8}, r"^bits: 8 is not possible here: the model's keys have 80 elements a head, "),
        ({"head_dim": 112}, {"value_bits": 4}, r"^bits: 4 .* values have 112 elements a head, .* \(32, 64, 128\)"),
        ({"head_dim": 96}, {"bits": 8, "group_size": 64}, r"^group_size: 64 doesn't divide the 96 .* one of 32$"),
        (WIDE, {"bits": 8, "cache": "dense"}, r"^bits: is for pages, and cache is set to 'dense'"),
        (WIDE, {"bits": 7}, r"^bits: 7 is not allowed: it must be one of 4, 5, 6, 8$"),
        (WIDE, {"bits": 8, "group_size": 16}, r"^group_size: 16 is not allowed: it must be one of 32, 64, 128$"),
    ],
)
def test_what_can_not_be_is_refused_at_attach(fields: dict[str, int], settings: Any, message: str) -> None:
    model = make("llama", **fields)
    with pytest.raises(ConfigError, match=message):
        tinykv.attach(model, **settings)
    assert "make_cache" not in vars(model)
    assert len(greedy(model, prompt(5), 2)) == 2


def test_a_group_size_that_divides_is_found() -> None:
    model = make("llama", num_hidden_layers=1, head_dim=96)
    with tinykv.attach(model, bits=8) as kv:
        assert kv.plan[0].storage == "8 bits in groups of 32"
        assert len(greedy(model, prompt(9), 3)) == 3


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_gather_dequantizes_the_pages_it_reads_and_no_others(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in the pool: of this request its own tokens, and with a window of 8 those of the pages it touches."""
    model, found = wide(kind), []
    own = Affine.decode

    def counting(packing: Affine, rows: mx.array, *more: Any) -> mx.array:
        found.append(rows.shape[0] * rows.shape[2])
        return own(packing, rows, *more)

    with tinykv.attach(model, page_size=4, attention="gather", bits=8) as kv:
        others = make_prompt_cache(model)
        logits(model, prompt(200, 1), others)
        cache = make_prompt_cache(model)
        logits(model, prompt(40), cache)
        monkeypatch.setattr(Affine, "decode", counting)
        logits(model, [5], cache)
        layers = [12 if line.kind == "window" else 44 for line in kv.plan]
        assert kv.stats().pages_total * 4 > 240
    assert len(found) == 2 * len(layers)
    for tokens, most in zip(found, [most for most in layers for _ in range(2)], strict=True):
        assert 0 < tokens <= most


def test_a_backend_that_says_nothing_of_quantized_pages_is_not_asked() -> None:
    class Eager:
        name, direct, priority = "eager", True, 99

        def supports(self, request: Any) -> list[str]:
            raise AssertionError("asked")

        resize = write = copy_pages = attend = supports

    class Plugin:
        @tinykv.hookimpl
        def tinykv_attention_backends(self) -> list[Any]:
            return [Eager()]

    manager = default_manager()
    manager.register(Plugin(), "eager")
    try:
        with tinykv.attach(wide("llama"), bits=8, attention="eager") as kv:
            assert (kv.plan[0].attention, kv.plan[0].backend) == ("gather", "gather")
            assert kv.plan[0].reason == "eager: quantized pages are not supported"
    finally:
        manager.unregister("eager")


def test_r50_mlx_lms_own_argument_is_checked() -> None:
    model = wide("llama")
    with tinykv.attach(model, bits=8, group_size=32):
        cache = make_prompt_cache(model)
        assert all(isinstance(layer, PagedKVCache) and not hasattr(layer, "bits") for layer in cache)
        assert not any(hasattr(layer.merge([layer, copy.deepcopy(layer)]), "bits") for layer in cache)
        for more in ({}, {"quantized_kv_start": 0}, {"quantized_kv_start": 11}):
            same = greedy(model, prompt(9), 5, kv_bits=8, kv_group_size=32, **more)
            assert same == greedy(model, prompt(9), 5)
        with pytest.raises(CacheStateError, match=r"kv_bits=4, kv_group_size=32: .* hold 8 bits in groups of 32"):
            greedy(model, prompt(9), 5, kv_bits=4, kv_group_size=32, quantized_kv_start=0)


def test_specs_that_differ_in_packing_differ() -> None:
    spec = LayerSpec(2, 64, 64, mx.float16, mx.float16)
    packed = spec.stored_as(KVFormat(8, 4))
    assert packed != spec == packed.unpacked
    assert packed.token_bytes() == 2 * (64 + 4 + 32 + 4)
    assert packed.model_token_bytes() == spec.token_bytes() == 2 * 2 * 128
    assert packed.storage() == "keys 8 bits in groups of 64, values 4 bits in groups of 64"
    assert spec.storage() == "float16"
