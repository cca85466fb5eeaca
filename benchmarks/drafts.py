"""Speculative decoding with paged caches: acceptance and tokens/s, and what a rewind costs.

    python benchmarks/drafts.py [--model PATH] [--tokens 64] [--drafts 2 4] [--json FILE]

The model drafts for itself (every draft is right: the most that can be accepted) and a tiny random model drafts for it
(no draft is right: the most that drafting can cost). Without --model the demo model SmolLM2-135M is fetched.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from tinykv_plugin.blas import load_blas

BLAS = load_blas()

import mlx.core as mx  # noqa: E402
from mlx_lm import load  # noqa: E402
from mlx_lm.generate import stream_generate  # noqa: E402
from mlx_lm.models import llama  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from running import model_folder, parse, parser_of, save  # noqa: E402

import tinykv_plugin as tinykv  # noqa: E402

PROMPT = "Explain how a lighthouse works, and why it was built on the cape."


def tiny(vocabulary: int) -> Any:
    """A random model that nearly never guesses right."""
    mx.random.seed(1)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=64,
            num_hidden_layers=1,
            intermediate_size=128,
            num_attention_heads=2,
            num_key_value_heads=1,
            rms_norm_eps=1e-5,
            vocab_size=vocabulary,
        )
    )
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    return model


def speed(model: Any, tokenizer: Any, tokens: int, **options: Any) -> tuple[float, float, list[int]]:
    """Tokens/s after the first one, the share of tokens that were drafted, and the tokens."""
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}], add_generation_prompt=True)
    times, found, drafted = [], [], 0
    for response in stream_generate(model, tokenizer, prompt, max_tokens=tokens, **options):
        times.append(time.perf_counter())
        found.append(response.token)
        drafted += bool(getattr(response, "from_draft", False))
    return (len(times) - 1) / (times[-1] - times[0]), drafted / len(found), found


def rewind_us(model: Any, context: int) -> float:
    """Microseconds to take 4 tokens back in all layers, with ``context`` tokens before them."""
    config = model.args
    heads, dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    times = []
    cache = make_prompt_cache(model)
    for count in [context] + [4] * 20:
        rows = mx.zeros((1, heads, count, dim))
        for layer in cache:
            layer.update_and_fetch(rows, rows)
        mx.eval([layer.state[:-1] for layer in cache])
        if count == 4:
            start = time.perf_counter()
            assert trim_prompt_cache(cache, 4) == 4
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", help="folder of a model in mlx-lm's format")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--contexts", nargs="+", type=int, default=[256, 4096, 32768], help="of the rewinds")
    parser.add_argument("--drafts", nargs="+", type=int, default=[2, 4])
    arguments = parse(parser, argv, tokens=6, drafts=[2], contexts=[64])
    folder = model_folder(arguments, dtype="float32")
    model, tokenizer = load(folder)
    own, _ = load(folder)
    drafts = {"itself": own, "a tiny random model": tiny(model.args.vocab_size)}
    console = Console(width=120)
    console.print(f"BLAS {BLAS.name}")
    results: dict[str, Any] = {}
    plain, _, expected = speed(model, tokenizer, arguments.tokens)
    table = Table("draft model", "drafts a pass", "accepted", "mlx-lm tokens/s", "paged tokens/s", "x without drafts")
    with tinykv.attach(model):
        paged, _, tokens = speed(model, tokenizer, arguments.tokens)
    assert tokens == expected
    table.add_row("none", "", "", f"{plain:.1f}", f"{paged:.1f}", "")
    results["none"] = {"mlx-lm": plain, "paged": paged}
    for name, draft in drafts.items():
        for count in arguments.drafts:
            options = {"draft_model": draft, "num_draft_tokens": count}
            stock, _, _ = speed(model, tokenizer, arguments.tokens, **options)
            with tinykv.attach(model) as kv, tinykv.attach(draft, budget_of=kv):
                rate, share, tokens = speed(model, tokenizer, arguments.tokens, **options)
            assert tokens == expected, "greedy tokens don't depend on drafts"
            table.add_row(name, str(count), f"{share:.0%}", f"{stock:.1f}", f"{rate:.1f}", f"{rate / paged:.2f}")
            results[f"{name}, {count}"] = {"accepted": share, "mlx-lm": stock, "paged": rate}
    console.print(table)
    table = Table("context", "4 tokens taken back in all layers")
    with tinykv.attach(model):
        for context in arguments.contexts:
            results[f"rewind at {context}"] = rewind_us(model, context)
            table.add_row(f"{context:,}", f"{results[f'rewind at {context}']:.0f} us")
    console.print(table)
    save(arguments, results)


if __name__ == "__main__":
    main()
