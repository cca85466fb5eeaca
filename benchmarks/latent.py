"""Decode steps of a model with latent attention (MLA), paged beside stock mlx-lm, by context and batch.

    python benchmarks/latent.py [--contexts 1024 4096 16384] [--batches 1 4] [--steps 12] [--page-size 32] [--json FILE]

The model (a deepseek_v3 with the latent and head dims of the real one, two layers, random weights, float32) computes
with the latent vectors itself, so pages are copied together at each step whatever backend there is. Times are medians
of whole decode steps, stock and paged taking turns; the ratio is paged by stock time. The logits of the last step are
compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tinykv_plugin.blas import load_blas

BLAS = load_blas()  # before mlx

import mlx.core as mx  # noqa: E402
from mlx_lm.models import deepseek_v3  # noqa: E402
from mlx_lm.models.cache import BatchKVCache, KVCache  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from running import parse, parser_of, save  # noqa: E402

import tinykv_plugin as tinykv  # noqa: E402

VOCABULARY = 512
LATENT, ROTARY = 512, 64


@dataclass(frozen=True)
class Result:
    """One context and batch; times of a decode step in ms."""

    context: int
    batch: int
    stock_ms: float
    paged_ms: float
    ratio: float
    difference: float
    reason: str


def make_model() -> Any:
    """Two layers with the attention of DeepSeek V3, but 16 heads and small feed-forward networks."""
    mx.random.seed(0)
    model = deepseek_v3.Model(
        deepseek_v3.ModelArgs(
            vocab_size=VOCABULARY,
            hidden_size=1024,
            intermediate_size=1024,
            num_hidden_layers=2,
            num_attention_heads=16,
            num_key_value_heads=16,
            kv_lora_rank=LATENT,
            q_lora_rank=512,
            qk_rope_head_dim=ROTARY,
            qk_nope_head_dim=128,
            v_head_dim=128,
            first_k_dense_replace=2,
            n_routed_experts=None,
        )
    )
    mx.eval(model.parameters())
    return model


def fill(cache: list[Any], context: int) -> None:
    """Random latent vectors, as if a prompt had been run: what is measured doesn't depend on them."""
    for start in range(0, context, 1024):
        count = min(1024, context - start)
        for layer in cache:
            layer.update_and_fetch(mx.random.normal((1, 1, count, LATENT)), mx.random.normal((1, 1, count, ROTARY)))
        mx.eval([layer.state for layer in cache])


def step(model: Any, cache: list[Any], token: int, batch: int) -> tuple[float, mx.array]:
    """Seconds of a decode step, and its logits."""
    start = time.perf_counter()
    logits = model(mx.full((batch, 1), token, dtype=mx.int32), cache=cache)
    mx.eval(logits)
    return time.perf_counter() - start, logits


def measure(model: Any, context: int, batch: int, page_size: int, steps: int) -> Result:
    """Both caches hold the same, and decode the same tokens in turns."""
    with tinykv.attach(model, page_size=page_size) as kv:
        caches: dict[str, list[Any]] = {"stock": [], "paged": []}
        for _ in range(batch):
            for kind, own in (("stock", [KVCache() for _ in model.layers]), ("paged", kv.make_cache())):
                mx.random.seed(len(caches[kind]))
                fill(own, context)
                caches[kind].append(own)
        stock: list[Any] = [BatchKVCache.merge(list(layer)) for layer in zip(*caches["stock"], strict=True)]
        paged: list[Any] = [type(layer[0]).merge(list(layer)) for layer in zip(*caches["paged"], strict=True)]
        if batch == 1:
            stock, paged = caches["stock"][0], caches["paged"][0]
        times: dict[str, list[float]] = {"stock": [], "paged": []}
        for number in range(steps + 2):
            logits = {}
            for kind, cache in (("stock", stock), ("paged", paged)):
                seconds, logits[kind] = step(model, cache, number % VOCABULARY, batch)
                if number >= 2:
                    times[kind].append(seconds)
        medians = {kind: 1e3 * statistics.median(found) for kind, found in times.items()}
        difference = float(mx.abs(logits["stock"] - logits["paged"]).max().item())  # type: ignore[arg-type]
        ratio = medians["paged"] / medians["stock"]
        return Result(context, batch, medians["stock"], medians["paged"], ratio, difference, kv.plan[0].reason)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--page-size", type=int, default=32)
    options = parse(parser, argv, contexts=[64], batches=[1, 2], steps=2)
    model = make_model()
    results = [
        measure(model, context, batch, options.page_size, options.steps)
        for context in options.contexts
        for batch in options.batches
    ]
    table = Table("context", "batch", "stock ms", "paged ms", "ratio", "difference", title=results[0].reason)
    for one in results:
        cells = (f"{one.stock_ms:.1f}", f"{one.paged_ms:.1f}", f"x{one.ratio:.2f}", f"{one.difference:.1e}")
        table.add_row(f"{one.context:,}", str(one.batch), *cells)
    Console().print(table)
    save(options, [asdict(one) for one in results])


if __name__ == "__main__":
    main()
