"""The suite that ``tinykv bench`` runs: what is measured, and the results as plain data for JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import batches, single
from .batches import Request
from .estimate import estimate
from .ways import STOCK, attached, machine, random_prompt, vocabulary, ways

FORMAT = 1
"""Of the JSON; a number higher than a program knows is refused."""

MOST_SAMPLES = 400

SCENARIOS = {
    "a": "prompts of very different lengths",
    "b": "a long prompt joins requests that answer",
    "c": "many requests in the bytes that stock needs for a few",
    "d": "clients with a common prefix",
}


# A length is repeated while its runs together stay within this part of the plan's time, and a single request may take
# half of what is left: the batches and scenarios after it, which show more, need the rest.
REPEATS_SHARE = 1 / 12
SINGLE_SHARE = 1 / 2

ENDED = "the run ended before it"


@dataclass(frozen=True)
class Plan:
    """How much is measured. ``lengths``: of prompts; ``rows``: of batches; ``scale`` divides the scenarios' lengths.

    ``seconds``: what doesn't fit into them, by what was measured before, is left out.
    """

    lengths: tuple[int, ...]
    tokens: int
    repeats: int
    rows: tuple[int, ...]
    row_prompt: int
    row_tokens: int
    scale: int
    seconds: float


FULL = Plan((64, 512, 1024, 2048, 4096), 32, 3, (1, 2, 4, 8, 16), 128, 32, 2, 720)
QUICK = Plan((64, 512), 16, 1, (1, 4), 32, 16, 8, 180)


@dataclass(frozen=True)
class Case:
    """One thing to measure, by the name that it has in tables; ``measure`` adds what it finds to the results.

    ``requests`` are what each of ``ways`` has to answer; they may take ``share`` of the time that is left.
    """

    name: str
    requests: Sequence[Request]
    ways: Sequence[str]
    share: float
    measure: Callable[[], None]


def case_names(plan: Plan) -> list[str]:
    """What is measured, in that order."""
    names = [f"prompt {length:,}" for length in plan.lengths] + [f"batch of {rows}" for rows in plan.rows]
    return names + list(SCENARIOS.values())


def run_suite(
    model: Any,
    label: str,
    plan: Plan,
    advance: Callable[[str], None],
    settings: dict[str, Any],
    save: Callable[[dict[str, Any]], None] = lambda results: None,
) -> dict[str, Any]:
    """Everything, as data. ``advance`` is told what comes next; ``settings`` go to all paged runs.

    ``save`` gets the results each time that there is more in them. What isn't in them is named under ``not_run``, with
    the reason.
    """
    known, wanted = vocabulary(model), ways(model, **settings)
    single.generate(model, 16, 4, known)  # warm up
    results: dict[str, Any] = {
        "format": FORMAT,
        "machine": machine(),
        "model": label,
        "plan": vars(plan),
        "settings": settings,
        "ways": list(wanted),
        "not_run": dict.fromkeys(case_names(plan), ENDED),
        "single": [],
        "batch": [],
        "scenarios": {},
        "memory": {},
    }
    with attached(model, list(wanted.values())[-1]) as kv:
        assert kv is not None
        results["kv_bytes_per_token"] = sum(group.token_bytes for group in kv.groups)
    start = time.perf_counter()
    for case in _cases(model, plan, known, wanted, results):
        advance(case.name)
        left = (plan.seconds - (time.perf_counter() - start)) * case.share
        needed = estimate(results, case.requests, case.ways)
        if needed is not None and needed > left:
            results["not_run"][case.name] = (
                f"left out, it would take about {needed:.0f} s and may take {max(left, 0):.0f} s"
            )
            continue
        case.measure()
        del results["not_run"][case.name]
        save(results)
    save(results)
    return results


def _cases(model: Any, plan: Plan, known: int, wanted: dict[str, Any], results: dict[str, Any]) -> Iterator[Case]:
    best = list(wanted)[-1]
    way = wanted[best] or {}
    two = (STOCK, best)
    names = iter(case_names(plan))
    for length in plan.lengths:
        request = Request(random_prompt(length, length, known), plan.tokens)

        def one(length: int = length) -> None:
            results["single"] += _single(model, length, plan, known, wanted)

        yield Case(next(names), [request], list(wanted), SINGLE_SHARE, one)
    for rows in plan.rows:
        batch = [Request(random_prompt(plan.row_prompt, row, known), plan.row_tokens) for row in range(rows)]

        def together(batch: list[Request] = batch) -> None:
            results["batch"] += _batch(model, batch, len(batch), way)

        yield Case(next(names), batch, two, 1, together)
    for letter, requests in batches.scenarios(plan.scale, known).items():

        def scenario(letter: str = letter, requests: list[Request] = requests) -> None:
            _scenario(model, letter, requests, way, results)

        yield Case(next(names), requests, two, 1, scenario)


def _single(model: Any, length: int, plan: Plan, known: int, wanted: dict[str, Any]) -> list[dict[str, Any]]:
    limit = plan.seconds * REPEATS_SHARE
    found = single.compare(model, length, plan.tokens, known, wanted, plan.repeats, limit)
    return [
        {
            "way": name,
            "prompt": length,
            "runs": got.runs,
            "first_token_s": got.first_token,
            "tokens_per_s": got.tokens_per_second,
            "equal": got.tokens == found[STOCK].tokens,
        }
        for name, got in found.items()
    ]


def _scenario(model: Any, letter: str, requests: list[Request], way: dict[str, Any], results: dict[str, Any]) -> None:
    compared = batches.compare(model, letter, requests, **way)
    results["scenarios"][letter] = {
        "about": SCENARIOS[letter],
        "equal": compared.equal,
        "requests": len(requests),
        "rows": compared.rows,
        "losing": compared.losing,
    }
    results["memory"][letter] = {
        STOCK: _thinned(compared.stock.samples),
        compared.backend: _thinned(compared.paged.samples),
    }


def _batch(model: Any, requests: list[Request], rows: int, way: dict[str, Any]) -> list[dict[str, Any]]:
    compared = batches.compare(model, "batch", requests, **way)
    found = []
    for name, outcome in ((STOCK, compared.stock), (compared.backend, compared.paged)):
        row = outcome.row()
        found.append(
            {
                "way": name,
                "rows": rows,
                "tokens_per_s": row["tokens/s"],
                "step_ms": row["decode step ms"],
                "peak_bytes": outcome.peak_bytes,
                "equal": compared.equal == rows,
            }
        )
    return found


def _thinned(samples: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """At most :data:`MOST_SAMPLES` of them, the highest of each stretch."""
    stretch = -(-len(samples) // MOST_SAMPLES)
    parts = [samples[start : start + stretch] for start in range(0, len(samples), stretch or 1)]
    return [(round(time, 4), size) for time, size in (max(part, key=lambda sample: sample[1]) for part in parts)]
