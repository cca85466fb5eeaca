"""The suite that ``tinykv bench`` runs: what is measured, and the results as plain data for JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import batches, single
from .batches import Request
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


@dataclass(frozen=True)
class Plan:
    """How much is measured. ``lengths``: of prompts; ``rows``: of batches; ``scale`` divides the scenarios' lengths."""

    lengths: tuple[int, ...]
    tokens: int
    repeats: int
    rows: tuple[int, ...]
    row_prompt: int
    row_tokens: int
    scale: int


FULL = Plan((64, 512, 1024, 2048, 4096), 64, 3, (1, 2, 4, 8, 16), 128, 64, 1)
QUICK = Plan((64, 512), 16, 1, (1, 4), 32, 16, 8)


def steps(plan: Plan) -> int:
    """How often :func:`run_suite` calls ``advance``."""
    return len(plan.lengths) + len(plan.rows) + len(SCENARIOS)


def run_suite(
    model: Any, label: str, plan: Plan, advance: Callable[[str], None], settings: dict[str, Any]
) -> dict[str, Any]:
    """Everything, as data. ``advance`` is told what comes next; ``settings`` go to all paged runs."""
    known, wanted = vocabulary(model), ways(model, **settings)
    best = list(wanted)[-1]
    single.generate(model, 16, 4, known)  # warm up
    results: dict[str, Any] = {
        "format": FORMAT,
        "machine": machine(),
        "model": label,
        "plan": vars(plan),
        "settings": settings,
        "ways": list(wanted),
        "single": [],
        "batch": [],
        "scenarios": {},
        "memory": {},
    }
    for length in plan.lengths:
        advance(f"one request, prompt of {length:,} tokens")
        found = single.compare(model, length, plan.tokens, known, wanted, plan.repeats)
        for name, got in found.items():
            results["single"].append(
                {
                    "way": name,
                    "prompt": length,
                    "first_token_s": got.first_token,
                    "tokens_per_s": got.tokens_per_second,
                    "equal": got.tokens == found[STOCK].tokens,
                }
            )
    for rows in plan.rows:
        advance(f"a batch of {rows}")
        requests = [Request(random_prompt(plan.row_prompt, row, known), plan.row_tokens) for row in range(rows)]
        results["batch"] += _batch(model, requests, rows, wanted[best] or {})
    for name, requests in batches.scenarios(plan.scale, known).items():
        advance(SCENARIOS[name])
        compared = batches.compare(model, name, requests, **(wanted[best] or {}))
        results["scenarios"][name] = {
            "about": SCENARIOS[name],
            "equal": compared.equal,
            "requests": len(requests),
            "rows": compared.rows,
            "losing": compared.losing,
        }
        results["memory"][name] = {
            STOCK: _thinned(compared.stock.samples),
            compared.backend: _thinned(compared.paged.samples),
        }
    with attached(model, wanted[best]) as kv:
        assert kv is not None
        results["kv_bytes_per_token"] = sum(group.page_bytes // group.page_size for group in kv.groups)
    return results


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
