"""What paging costs and saves beside stock mlx-lm, both in one process, taking turns.

    python benchmarks/overhead.py [--steps 300] [--forks 25] [--json FILE]

(a) Python bookkeeping per layer of a decode step: ``update_and_fetch`` and attention up to the point where the graph
is evaluated, which is left out. Target: at most 1.5 times stock.

(b) Copying a conversation of 4,096 tokens and appending one token to the copy, evaluated: paged forks share pages,
stock copies everything. Target: at least 50 times less time, and one page per layer instead of the whole cache.

Figures are medians; cases that miss their target are named at the end.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tinykv_plugin.blas import load_blas

load_blas()  # before mlx

import mlx.core as mx  # noqa: E402
from mlx_lm.models import base, llama  # noqa: E402
from mlx_lm.models.cache import KVCache  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from running import parse, parser_of, save  # noqa: E402
from shapes import HEAD_DIM, HEADS, KV_HEADS, LAYERS, fill, make_model, settle, tokens  # noqa: E402

import tinykv_plugin as tinykv  # noqa: E402
from tinykv_plugin.units import format_bytes  # noqa: E402

PAGE_SIZE = 32
STEP_TARGET, FORK_TARGET = 1.5, 50.0


@dataclass(frozen=True)
class Case:
    """A comparison. ``ratio`` is what the target is about, ``good`` whether it is met."""

    name: str
    unit: str
    stock: float
    paged: float
    ratio: float
    target: str
    good: bool


def scattered(kv: tinykv.Attachment, model: Any, count: int) -> list[Any]:
    """A request whose pages lie apart: another one took every second page and keeps it."""
    mine, other = model.make_cache(), model.make_cache()
    for _ in range(count // PAGE_SIZE):
        fill(mine, PAGE_SIZE)
        fill(other, PAGE_SIZE)
    mine[0].neighbour = other  # kept as long as the request is
    return mine


def build_step(cache: list[Any], attend: Callable[..., mx.array], query: mx.array, new: mx.array) -> float:
    """Seconds to build one decode step's graph, per layer; evaluated outside of what is timed."""
    start = time.perf_counter()
    mask = cache[0].make_mask(1, return_array=False, window_size=None)
    for layer in cache:
        layer.offset, layer.offset  # noqa: B018  (models ask twice: for the queries and for the keys)
        keys, values = layer.update_and_fetch(new, new)
        out = attend(query, keys, values, cache=layer, scale=1.0, mask=mask)
    seconds = time.perf_counter() - start
    mx.eval(out)
    settle(cache)
    return seconds / len(cache)


def bookkeeping(model: Any, steps: int) -> list[Case]:
    """Part (a)."""
    query, new = mx.random.normal((1, HEADS, 1, HEAD_DIM)), tokens(1)
    mx.eval(query)
    cases = []
    for name, context, apart in (
        ("context 500", 500, False),
        ("context 4,000", 4000, False),
        ("pages apart", 500, True),
    ):
        stock_cache = [KVCache() for _ in range(LAYERS)]
        fill(stock_cache, context)
        with tinykv.attach(model, page_size=PAGE_SIZE, attention="gather") as kv:
            cache = scattered(kv, model, context) if apart else model.make_cache()
            if not apart:
                fill(cache, context)
            stock, paged = [], []
            for _ in range(steps):
                stock.append(build_step(stock_cache, base.scaled_dot_product_attention, query, new))
                paged.append(build_step(cache, llama.scaled_dot_product_attention, query, new))
        dense, ours = statistics.median(stock) * 1e6, statistics.median(paged) * 1e6
        ratio = ours / dense
        cases.append(
            Case(f"decode step, {name}", "µs/layer", dense, ours, ratio, f"≤ {STEP_TARGET}x", ratio <= STEP_TARGET)
        )
    return cases


def fork_once(cache: list[Any], new: mx.array) -> tuple[float, int]:
    """Seconds, and bytes held more, for a copy of ``cache`` with one token more."""
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    start = time.perf_counter()
    fork = copy.deepcopy(cache)
    for layer in fork:
        layer.update_and_fetch(new, new)
    settle(fork)
    seconds = time.perf_counter() - start
    return seconds, mx.get_active_memory() - before


def forking(model: Any, forks: int, context: int) -> list[Case]:
    """Part (b)."""
    new = tokens(1)
    # A token past a page's end shares whole pages only; the last page is copied too if the conversation ends inside.
    cases = []
    for name, length in (("whole pages", context), ("ends inside a page", context - 5)):
        stock_cache = [KVCache() for _ in range(LAYERS)]
        fill(stock_cache, length)
        with tinykv.attach(model, page_size=PAGE_SIZE, attention="gather") as kv:
            cache = model.make_cache()
            fill(cache, length)
            page_bytes = kv.stats().bytes_used // kv.stats().pages_used
            fork_once(cache, new)
            stock, paged, pages = [], [], []
            for _ in range(forks):
                stock.append(fork_once(stock_cache, new))
                used = kv.stats().pages_used
                fork = copy.deepcopy(cache)
                for layer in fork:
                    layer.update_and_fetch(new, new)
                settle(fork)
                pages.append(kv.stats().pages_used - used)
                del fork, layer
                paged.append(fork_once(cache, new))
        dense, ours = (statistics.median(seconds for seconds, _ in runs) * 1e3 for runs in (stock, paged))
        ratio = dense / ours
        cases.append(
            Case(
                f"fork of {length:,} tokens, {name}",
                "ms",
                dense,
                ours,
                ratio,
                f"≥ {FORK_TARGET:.0f}x",
                ratio >= FORK_TARGET,
            )
        )
        held = statistics.median(more for _, more in stock)
        taken = max(pages)
        cases.append(
            Case(
                "its bytes",
                "bytes",
                held,
                taken * page_bytes,
                held / (taken * page_bytes),
                "1 page/layer",
                taken == 1,
            )
        )
    return cases


def show(cases: list[Case]) -> None:
    shape = f"{LAYERS} layers, {KV_HEADS} K/V heads of {HEAD_DIM}, float32, pages of {PAGE_SIZE} tokens"
    table = Table(title=f"{shape}; medians")
    table.add_column("case")
    for name in ("stock", "paged", "ratio", "target", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for case in cases:
        number = format_bytes if case.unit == "bytes" else lambda value, unit=case.unit: f"{value:,.2f} {unit}"
        table.add_row(
            case.name,
            number(case.stock),
            number(case.paged),
            f"{case.ratio:,.2f}x",
            case.target,
            "" if case.good else "missed",
        )
    console = Console()
    console.width = max(console.width, 100)
    console.print(table)
    for case in cases:
        if not case.good:
            console.print(f"missed: {case.name}: {case.ratio:.2f}x, target {case.target}", soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=300, help="decode steps to time (default: %(default)s)")
    parser.add_argument("--forks", type=int, default=25, help="forks to time (default: %(default)s)")
    parser.add_argument("--context", type=int, default=4096, help="tokens that are forked (default: %(default)s)")
    options = parse(parser, argv, steps=2, forks=2, context=64)
    mx.random.seed(0)
    model = make_model()
    cases = bookkeeping(model, options.steps) + forking(model, options.forks, options.context)
    show(cases)
    save(options, [asdict(case) for case in cases])


if __name__ == "__main__":
    main()
