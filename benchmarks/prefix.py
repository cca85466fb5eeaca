"""Chats over a common system prompt, and a restart: stock mlx-lm and paged side by side in one process.

    python benchmarks/prefix.py [--model PATH] [--chats 8] [--turns 6] [--system 1500] [--quick] [--json FILE]

Chats take turns, one request at a time, as mlx-lm's server would serve them: stock keeps whole caches in its
LRUPromptCache, the system prompt's and each answer's, as its server does; paged uses ``kv.prefix_cache``. Answers are
compared. After that the paged model is attached anew, with what is on disk. Without --model the demo model SmolLM2-135M
is fetched.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from tinykv_plugin.blas import load_blas

BLAS = load_blas()

import mlx.core as mx  # noqa: E402
from mlx_lm import load  # noqa: E402
from mlx_lm.generate import generate_step  # noqa: E402
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from running import model_folder, parse, parser_of, save  # noqa: E402

import tinykv_plugin as tinykv  # noqa: E402
from tinykv_plugin.bench.ways import random_prompt, vocabulary  # noqa: E402

ANSWER, QUESTION = 12, 60
KEY = ("model", None, None)

# Answers a prompt: its tokens, how many of them are the system prompt's; returns seconds to the first token, the
# tokens run, and the answer.
Serve = Callable[[list[int], int], tuple[float, int, list[int]]]


def stock_server(model: Any, store: LRUPromptCache) -> Serve:
    """What mlx-lm's server does with its prompt cache."""

    def serve(prompt: list[int], system: int) -> tuple[float, int, list[int]]:
        start = time.perf_counter()
        cache, rest = store.fetch_nearest_cache(KEY, prompt)
        if cache is None:
            cache = make_prompt_cache(model)
        ran = len(rest)
        if len(prompt) - len(rest) < system:
            # The server cuts prompts where the system prompt ends, and keeps that part.
            head = system - (len(prompt) - len(rest))
            for _ in range(0, head, 512):
                chunk, rest = rest[: min(512, head)], rest[min(512, head) :]
                head -= len(chunk)
                model(mx.array([chunk]), cache=cache)
                mx.eval([layer.state for layer in cache])
            store.insert_cache(KEY, prompt[:system], copy.deepcopy(cache), cache_type="system")
        answer, first = answer_of(model, rest, cache, start)
        store.insert_cache(KEY, (prompt + answer)[: cache[0].offset], cache)
        return first, ran, answer

    return serve


def paged_server(model: Any, kv: tinykv.Attachment) -> Serve:
    """The same with the prefix cache."""

    def serve(prompt: list[int], system: int) -> tuple[float, int, list[int]]:
        start = time.perf_counter()
        cache, rest = kv.prefix_cache.fetch(prompt)
        answer, first = answer_of(model, rest, cache, start)
        kv.prefix_cache.insert(prompt + answer, cache)
        return first, len(rest), answer

    return serve


def answer_of(model: Any, rest: Sequence[int], cache: Any, start: float) -> tuple[list[int], float]:
    """Tokens of the answer, and the seconds from ``start`` to the first one."""
    answer, first = [], 0.0
    for token, _ in generate_step(mx.array(rest), model, max_tokens=ANSWER, prompt_cache=cache, prefill_step_size=512):
        first = first or time.perf_counter() - start
        answer.append(int(token))
    return answer, first


class Conversation:
    """What was asked and answered so far."""

    def __init__(self, system: list[int], seed: int, known: int) -> None:
        self.tokens = list(system)
        self._seeds = itertools.count(1000 * seed)
        self._known = known

    def ask(self) -> list[int]:
        """The prompt of the next turn."""
        self.tokens += random_prompt(QUESTION, next(self._seeds), self._known)
        return self.tokens


def converse(serve: Serve, system: list[int], chats: int, turns: int, known: int) -> dict[str, Any]:
    """All turns of all chats. ``unique`` counts the prompts' tokens, those that several requests begin with once."""
    conversations = [Conversation(system, seed, known) for seed in range(1, chats + 1)]
    cold, hits, ran, answers = [], [], 0, []
    for _ in range(turns):
        for conversation in conversations:
            prompt = conversation.ask()
            first, count, answer = serve(list(prompt), len(system))
            (hits if count < len(prompt) else cold).append(first)
            ran += count
            answers.append(answer)
            conversation.tokens = prompt + answer
    # The last token of an answer is run with the next question.
    unique = len(system) + chats * (turns * QUESTION + (turns - 1))
    return {"cold": cold, "hits": hits, "ran": ran, "unique": unique, "answers": answers}


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", help="a local model folder")
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--system", type=int, default=1500)
    parser.add_argument("--quick", action="store_true", help="two chats of two turns over 300 tokens")
    arguments = parse(parser, argv, chats=2, turns=2, system=80)
    if arguments.quick:
        arguments.chats, arguments.turns, arguments.system = 2, 2, 300
    folder = model_folder(arguments)
    model, _ = load(folder)
    known = vocabulary(model)
    system = random_prompt(arguments.system, 0, known)
    console = Console()
    console.print(f"model {folder}, BLAS {BLAS.name}")
    answer_of(model, [1, 2, 3], make_prompt_cache(model), 0.0)  # warm up

    store = LRUPromptCache(max_size=1000)
    results = {"stock": converse(stock_server(model, store), system, arguments.chats, arguments.turns, known)}
    results["stock"]["bytes"] = store.nbytes
    del store
    with tempfile.TemporaryDirectory() as folder:
        with tinykv.attach(model, prefix_dir=folder) as kv:
            results["paged"] = converse(paged_server(model, kv), system, arguments.chats, arguments.turns, known)
            results["paged"]["bytes"] = kv.prefix_cache.nbytes
            pages = -(-kv.prefix_cache.tokens // kv.config.page_size)
            results["paged"]["bytes of unique pages"] = pages * kv.groups[0].page_bytes
            start = time.perf_counter()
            kv.prefix_cache.flush()
            results["paged"]["flush s"] = time.perf_counter() - start
        with tinykv.attach(model, prefix_dir=folder) as kv:
            results["restart"] = converse(paged_server(model, kv), system, arguments.chats, 1, known)
            results["restart"]["bytes"] = kv.prefix_cache.nbytes
    report(console, results, arguments)
    save(arguments, {"blas": BLAS.name, **results})


def report(console: Console, results: dict[str, Any], arguments: argparse.Namespace) -> None:
    title = f"{arguments.chats} chats of {arguments.turns} turns over {arguments.system} tokens"
    table = Table(title=title, title_justify="left")
    for column in ("", "tokens run", "x unique", "cold s", "hit p50 s", "hit p95 s", "cold / hit", "MB held"):
        table.add_column(column, justify="right")
    for name, found in results.items():
        hits = sorted(found["hits"]) or [float("nan")]
        p50, p95 = statistics.median(hits), hits[min(len(hits) - 1, int(0.95 * len(hits)))]
        cold = results["paged" if name == "restart" else name]["cold"][0]
        found |= {"hit p50 s": p50, "hit p95 s": p95}
        table.add_row(
            name,
            str(found["ran"]),
            f"{found['ran'] / found['unique']:.2f}",
            f"{cold:.2f}",
            f"{p50:.3f}",
            f"{p95:.3f}",
            f"{cold / p50:.1f}",
            f"{found['bytes'] / 1e6:.1f}",
        )
    console.print(table)
    stock, paged, restart = results["stock"], results["paged"], results["restart"]
    console.print(f"same answers as stock: {paged['answers'] == stock['answers']}")
    first = paged["answers"][: arguments.chats]
    console.print(f"after the restart: {restart['answers'] == first}")
    targets = {
        "tokens run <= 1.05 x unique": paged["ran"] <= 1.05 * paged["unique"],
        "a hit >= 5 x faster than cold": 5 * paged["hit p50 s"] <= paged["cold"][0],
        "a hit <= stock's": paged["hit p50 s"] <= stock["hit p50 s"],
        "bytes <= 1.1 x unique pages": paged["bytes"] <= 1.1 * paged["bytes of unique pages"],
    }
    for target, met in targets.items():
        console.print(f"{'met' if met else 'missed'}: {target}")


if __name__ == "__main__":
    main()
