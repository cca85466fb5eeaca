"""A long mixed load on a tiny random model: arrivals, cancellations, failures and a budget for about 20 requests.

    python benchmarks/soak.py [--requests 500] [--seed 0] [--pages 160]

Every request that was neither cancelled nor made to fail must give the same tokens as stock mlx-lm does for it alone;
none may be lost, no page leaked, and the pool's bytes must not change once it has grown. Exits with 1 otherwise.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from rich.console import Console
from rich.progress import Progress
from running import parse, parser_of, save

import tinykv_plugin as tinykv


@dataclass
class SoakResult:
    """Counts of what happened; ``wrong``, ``lost`` and ``leaked_pages`` must be zero."""

    finished: int = 0
    cancelled: int = 0
    failed_on_purpose: int = 0
    preempted: int = 0
    wrong: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    leaked_pages: int = 0
    reserved_bytes: set[int] = field(default_factory=set)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.wrong and not self.lost and not self.leaked_pages and len(self.reserved_bytes) == 1


def tiny_model() -> Any:
    mx.random.seed(3)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=64,
            num_hidden_layers=3,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=97,
        )
    )
    model.set_dtype(mx.float32)
    model.apply(lambda weight: weight + 0.3 * mx.random.normal(weight.shape) if weight.ndim > 1 else weight)
    mx.eval(model.parameters())
    return model


def solo(model: Any, prompt: list[int], tokens: int) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=tokens)]


def soak(requests: int, seed: int, pages: int, progress: Progress | None = None) -> SoakResult:
    """Run the load to its end."""
    rng = random.Random(seed)
    model = tiny_model()
    prompts = [[rng.randrange(97) for _ in range(int(rng.expovariate(1 / 20)) + 1)] for _ in range(requests)]
    prompts = [prompt[:90] for prompt in prompts]
    limits = [rng.randrange(1, 40) for _ in range(requests)]
    expected = [solo(model, prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
    doomed = {index: rng.randrange(1, 10) for index in range(requests) if rng.random() < 0.05}
    result = SoakResult()
    answers: dict[int, list[int]] = {index: [] for index in range(requests)}
    ended: set[int] = set()
    running: dict[int, int] = {}
    task = progress.add_task("requests", total=requests) if progress is not None else None
    start = time.perf_counter()
    with tinykv.attach(model, page_size=4, max_pages=pages) as kv:
        generator = tinykv.PagedBatchGenerator(model, prefill_step_size=32)
        arriving = list(range(requests))
        while arriving or generator.busy:
            for _ in range(min(len(arriving), rng.choice((0, 0, 1, 2, 5)))):
                index = arriving.pop(0)
                processors = [[_Exploding(doomed[index])]] if index in doomed else None
                (uid,) = generator.insert([prompts[index]], [limits[index]], logits_processors=processors)
                running[uid] = index
            if running and rng.random() < 0.03:
                uid = rng.choice(list(running))
                generator.remove([uid])
                ended.add(running.pop(uid))
                result.cancelled += 1
            if not generator.busy:
                continue
            for response in generator.next()[1]:
                index = running[response.uid]
                if response.finish_reason != "error":
                    answers[index].append(response.token)
                if response.finish_reason is not None:
                    del running[response.uid]
                    ended.add(index)
                    if response.finish_reason == "error":
                        result.failed_on_purpose += 1
                        if index not in doomed or not isinstance(response.error, ZeroDivisionError):
                            result.wrong.append(index)
                    else:
                        result.finished += 1
                        if answers[index] != expected[index]:
                            result.wrong.append(index)
            if len(ended) > requests // 5:
                result.reserved_bytes.add(kv.stats().bytes_reserved)
            if progress is not None and task is not None:
                progress.update(task, completed=len(ended))
        result.preempted = generator.counts.preempted
        generator.close()
        kv.check()
        result.leaked_pages = kv.stats().pages_used
    result.lost = sorted(set(range(requests)) - ended)
    result.seconds = time.perf_counter() - start
    return result


class _Exploding:
    """A logits processor that raises at its ``at``-th call."""

    def __init__(self, at: int) -> None:
        self._left = at

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self._left -= 1
        if self._left == 0:
            raise ZeroDivisionError("injected")
        return logits


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pages", type=int, default=160, help="pages of 4 tokens")
    arguments = parse(parser, argv, requests=30, pages=48)
    logging.getLogger("tinykv").setLevel(logging.CRITICAL)  # the injected failures are expected
    console = Console()
    with Progress(console=console, transient=True) as progress:
        result = soak(arguments.requests, arguments.seed, arguments.pages, progress)
    console.print(
        f"{result.finished} finished, {result.cancelled} cancelled, {result.failed_on_purpose} made to fail, "
        f"{result.preempted} preemptions, {len(result.wrong)} wrong, {len(result.lost)} lost, "
        f"{result.leaked_pages} pages leaked, pool sizes {sorted(result.reserved_bytes)} bytes, {result.seconds:.1f} s"
    )
    save(arguments, {**asdict(result), "reserved_bytes": sorted(result.reserved_bytes)})
    if not result.ok:
        sys.exit(1)


if __name__ == "__main__":
    main()
