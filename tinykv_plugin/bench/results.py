"""Figures: the results of a suite as a flat list, with ratios; reading, comparing and finding what loses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import TinyKVError
from .batches import RATIO
from .suite import FORMAT
from .ways import STOCK

# More of it is worse.
SMALLER_IS_BETTER = ("first token s", "step ms", "K/V peak MB")

# What sizes the cases of a part have in a plan; their figures are comparable only where these are equal.
SIZES = {"batch": ("row_prompt", "row_tokens"), "scenarios": ("scale",)}

PARTS = ("machine", "model", "plan", "settings", "ways", "single", "batch", "scenarios", "memory")


class ResultsError(TinyKVError, ValueError):
    """A file holds no results of a benchmark that can be read here."""


@dataclass(frozen=True)
class Figure:
    """One number: of what ``case``, which quantity, in which way."""

    case: str
    quantity: str
    way: str
    value: float


def read(path: Path) -> dict[str, Any]:
    """The results in a file that ``tinykv bench`` wrote. Raises ResultsError."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path}: can't be read as results of tinykv bench: {error}") from None
    version = results.get("format") if isinstance(results, dict) else None
    if not isinstance(version, int) or version > FORMAT:
        raise ResultsError(
            f"{path}: format {version!r} is not known; this tinykv reads results of format {FORMAT}, "
            f"as tinykv bench writes them"
        )
    missing = [part for part in PARTS if part not in results]
    if missing:
        raise ResultsError(
            f"{path}: the results have no {', '.join(missing)}; a file that tinykv bench wrote has, even of a run that "
            f"was interrupted"
        )
    return dict(results)


def not_run(results: dict[str, Any]) -> list[str]:
    """The cases that were not measured, each with the reason."""
    return [f"{case}: {reason}" for case, reason in results.get("not_run", {}).items()]


def figures(results: dict[str, Any]) -> Iterator[Figure]:
    """Every number that a comparison is about."""
    for row in results["single"]:
        case = f"prompt {row['prompt']:,}"
        yield Figure(case, "first token s", row["way"], row["first_token_s"])
        yield Figure(case, "tokens/s", row["way"], row["tokens_per_s"])
    for row in results["batch"]:
        case = f"batch of {row['rows']}"
        yield Figure(case, "tokens/s", row["way"], row["tokens_per_s"])
        yield Figure(case, "step ms", row["way"], row["step_ms"])
        yield Figure(case, "K/V peak MB", row["way"], row["peak_bytes"] / 1e6)
    for scenario in results["scenarios"].values():
        for name, row in scenario["rows"].items():
            if name == RATIO:
                continue
            yield Figure(scenario["about"], "tokens/s", name, row["tokens/s"])
            yield Figure(scenario["about"], "K/V peak MB", name, row["K/V peak MB"])


def gain(quantity: str, old: float, new: float) -> float:
    """How many times better ``new`` is than ``old``: above 1 is better, whichever way the quantity counts."""
    if not old or not new:
        return 1.0
    return old / new if quantity in SMALLER_IS_BETTER else new / old


def shown(value: float) -> str:
    """For a table: three digits at least, and no powers of ten."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def against_stock(results: dict[str, Any]) -> list[tuple[Figure, float, float]]:
    """Each figure of a paged way, stock's value of the same, and the gain."""
    found = list(figures(results))
    stock = {(figure.case, figure.quantity): figure.value for figure in found if figure.way == STOCK}
    pairs = [(figure, stock[figure.case, figure.quantity]) for figure in found if figure.way != STOCK]
    return [(figure, base, gain(figure.quantity, base, figure.value)) for figure, base in pairs]


def losing(results: dict[str, Any]) -> list[str]:
    """What is worse than stock by a hundredth or more, in words, the worst first."""
    worse = sorted((found for found in against_stock(results) if round(found[2], 2) < 1), key=lambda found: found[2])
    return [f"{figure.way}: {figure.quantity} of {figure.case}: x{factor:.2f}" for figure, _, factor in worse]


def differing(results: dict[str, Any]) -> list[str]:
    """Cases in which an answer was not stock's."""
    found = [f"prompt {row['prompt']:,} ({row['way']})" for row in results["single"] if not row["equal"]]
    found += [f"batch of {row['rows']}" for row in results["batch"] if row["way"] != STOCK and not row["equal"]]
    found += [
        f"{scenario['about']}: {scenario['requests'] - scenario['equal']} of {scenario['requests']}"
        for scenario in results["scenarios"].values()
        if scenario["equal"] != scenario["requests"]
    ]
    return found


def compare(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[Figure, float, float]]:
    """Each figure of a case that both have, of the same size: the new one, the old value, and the gain."""
    for part, names in SIZES.items():
        if any(old["plan"].get(name) != new["plan"].get(name) for name in names):
            new = new | {part: type(new[part])()}
    before = {(figure.case, figure.quantity, figure.way): figure.value for figure in figures(old)}
    return [
        (figure, before[key], gain(figure.quantity, before[key], figure.value))
        for figure in figures(new)
        if (key := (figure.case, figure.quantity, figure.way)) in before
    ]


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What else is not the same in two results, so that their figures can't just be compared."""
    found = [] if old["model"] == new["model"] else [f"model: {old['model']} and {new['model']}"]
    for name in ("device", "platform", "cores", "memory", "mlx", "mlx-lm", "blas"):
        one, other = old["machine"].get(name), new["machine"].get(name)
        if one != other:
            found.append(f"{name}: {one} and {other}")
    for part, names in SIZES.items():
        one, other = (", ".join(f"{name} {run['plan'].get(name)}" for name in names) for run in (old, new))
        if one != other:
            found.append(f"{part}: {one} and {other}, so these are not compared")
    for letter, run in (("A", old), ("B", new)):
        found += [f"{letter} has no {line}" for line in not_run(run)]
    return found
