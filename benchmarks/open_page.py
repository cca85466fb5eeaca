"""What few bits would cost if the page that is being filled stayed in full precision: perplexity, simulated.

    python benchmarks/open_page.py [--model PATH] [--tokens 4096] [--context 1024] [--page-size 32] [--json FILE]

Pages are quantized as they are written. Here attention is written out over whole contexts (benchmarks/texts), with K
and V rounded as in pages; or so that each token reads those of its own page unrounded and all pages before it rounded,
however the prompt is cut into chunks. Without --model the demo model SmolLM2-135M is fetched.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinykv_plugin.blas import load_blas

BLAS = load_blas()

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx_lm import load  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from running import model_folder, parse, parser_of, save  # noqa: E402

from tinykv_plugin.cli.patches import replaced  # noqa: E402

TEXT = Path(__file__).parent / "texts" / "samuel.txt"
GROUP_SIZE = 64
# Of keys and of values.
BITS = {
    "8 bits": (8, 8),
    "6 bits": (6, 6),
    "5 bits": (5, 5),
    "4 bits": (4, 4),
    "keys 8, values 4 bits": (8, 4),
}
ATTENTION = "scaled_dot_product_attention"


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, bits: tuple[int, int], open_page: int | None
) -> mx.array:
    """Causal attention over rounded K and V; a token's own page of ``open_page`` tokens is not rounded."""

    def rounded(x: mx.array, bits: int) -> mx.array:
        return mx.dequantize(*mx.quantize(x, GROUP_SIZE, bits), GROUP_SIZE, bits)

    (key_bits, value_bits), full = bits, values
    rounded_keys, values = rounded(keys, key_bits), rounded(values, value_bits)

    def for_queries(x: mx.array) -> mx.array:
        return mx.repeat(x, queries.shape[1] // x.shape[1], axis=1)

    places = mx.arange(queries.shape[2])
    scores = queries * scale @ for_queries(rounded_keys).swapaxes(2, 3)
    if open_page is not None:
        own = places[:, None] // open_page == places // open_page
        scores = mx.where(own, queries * scale @ for_queries(keys).swapaxes(2, 3), scores)
    weights = mx.softmax(mx.where(places[:, None] >= places, scores, -mx.inf), axis=-1)
    if open_page is None:
        return weights @ for_queries(values)
    return mx.where(own, 0, weights) @ for_queries(values) + mx.where(own, weights, 0) @ for_queries(full)


def loss(model: Any, tokens: mx.array, bits: tuple[int, int] | None = None, open_page: int | None = None) -> float:
    """The mean of minus the logarithm of the probability of every token but the first."""
    module = sys.modules[type(model).__module__]

    def simulated(q: mx.array, k: mx.array, v: mx.array, *, scale: float, **_: Any) -> mx.array:
        assert bits is not None
        return attention(q, k, v, scale, bits, open_page)

    with replaced(module, ATTENTION, simulated if bits is not None else getattr(module, ATTENTION)):
        logits = model(tokens[None, :-1], cache=make_prompt_cache(model))[0]
    chosen = mx.take_along_axis(logits, tokens[1:, None], axis=1)[:, 0]
    return float((mx.logsumexp(logits, axis=1) - chosen).mean())


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", help="folder of a model in mlx-lm's format")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--page-size", type=int, default=32)
    arguments = parse(parser, argv, tokens=96, context=48, page_size=8)
    model, tokenizer = load(model_folder(arguments, dtype="float32"))
    tokens = mx.array(tokenizer.encode(TEXT.read_text(encoding="utf-8"))[: arguments.tokens])
    contexts = [tokens[start : start + arguments.context] for start in range(0, tokens.size, arguments.context)]
    full = [loss(model, context) for context in contexts]
    table = Table("K/V", "quantized as written", f"the open page of {arguments.page_size} in full precision")
    results: dict[str, dict[str, float]] = {}
    for name_of_bits, bits in BITS.items():
        found = {}
        for name, open_page in (("as written", None), ("open page", arguments.page_size)):
            more = [loss(model, one, bits, open_page) - before for one, before in zip(contexts, full, strict=True)]
            found[name] = math.expm1(float(np.mean(more)))
        table.add_row(name_of_bits, *(f"{change:+.2%}" for change in found.values()))
        results[name_of_bits] = found
    console = Console(width=120)
    console.print(f"perplexity against full precision, {len(contexts)} contexts of {arguments.context} tokens")
    console.print(table)
    save(arguments, results)


if __name__ == "__main__":
    main()
