"""report(): the results of a suite as one HTML file that loads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from .. import __version__
from ..units import format_bytes
from .chart import line_chart
from .results import against_stock, differing, losing, not_run, shown

STYLE = """
:root { color-scheme: light dark; --ground: #f6f7f9; --panel: #fff; --line: #d9dde3; --text: #1b2330; --quiet: #5a6576;
  --c0: #6b7280; --c1: #0072b2; --c2: #d55e00; --c3: #009e73; }
@media (prefers-color-scheme: dark) { :root { --ground: #12161c; --panel: #1b212a; --line: #313a47; --text: #e6eaf0;
  --quiet: #9aa6b8; --c0: #aeb6c2; --c1: #56b4e9; --c2: #f0a35e; --c3: #35c99a; } }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--ground); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--panel); border: 1px solid var(--line); border-radius: .6rem; padding: .8rem; }
figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
text.axis { fill: var(--quiet); font-size: 12px; } line.grid { stroke: var(--line); }
polyline { fill: none; stroke-width: 2.5; }
polyline.c0, circle.c0 { stroke: var(--c0); } polyline.c1, circle.c1 { stroke: var(--c1); }
polyline.c2, circle.c2 { stroke: var(--c2); } polyline.c3, circle.c3 { stroke: var(--c3); }
circle { fill: var(--panel); stroke-width: 2; }
.legend { list-style: none; display: flex; gap: 1.2rem; padding: 0; margin: .3rem 0 0; }
.legend i { display: inline-block; width: .8rem; height: .8rem; border-radius: .15rem; margin-right: .4rem; }
i.c0 { background: var(--c0); } i.c1 { background: var(--c1); }
i.c2 { background: var(--c2); } i.c3 { background: var(--c3); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; background: var(--panel); }
th, td { text-align: right; padding: .25rem .7rem; border: 1px solid var(--line); font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; } .worse { color: var(--c2); } .none { color: var(--quiet); }
"""


def report(results: dict[str, Any]) -> str:
    """The whole page."""
    machine = results["machine"]
    facts = {**machine, "memory": format_bytes(machine["memory"]), "model": results["model"]}
    settings = results["settings"]
    facts["settings"] = ", ".join(f"{name} = {value}" for name, value in settings.items()) or "the defaults"
    worse, wrong, missing = losing(results), differing(results), not_run(results)
    partial = (
        f'<p class="worse">Not everything was run: {len(missing)} of the cases are missing.</p>' if missing else ""
    )
    equal = "Every answer is the one of stock mlx-lm." if not wrong else f"Answers differ: {'; '.join(wrong)}."
    return "".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>tinykv bench: {escape(results['model'])}</title><style>{STYLE}</style></head><body>",
            f"<h1>tinykv bench: {escape(results['model'])}</h1>",
            f"<p>{escape(equal)} Ways: {escape(', '.join(results['ways']))}. Ratios above 1 are better than stock.</p>",
            partial,
            f'<div class="charts">{"".join(charts(results))}</div>',
            f"<h2>Where paged is worse</h2>{_list(worse)}",
            f"<h2>All figures</h2>{_figures(results)}",
            f"<h2>Not run</h2>{_list(missing)}" if missing else "",
            f"<h2>Measured on</h2>{_table(('', ''), [(name, str(value)) for name, value in facts.items()])}",
            f'<p class="none">tinykv-plugin {escape(__version__)}; the raw numbers are in the JSON file.</p>',
            "</body></html>\n",
        )
    )


def charts(results: dict[str, Any]) -> Iterable[str]:
    """Memory over time, speed and time to the first token by context, and the batch sweep."""
    stock, *paged = results["ways"]
    # The best way, which is last, comes second: it has the same colour in all charts.
    by_length = {
        way: [(row["prompt"], row) for row in results["single"] if row["way"] == way]
        for way in [stock, *reversed(paged)]
    }
    for name, series in results["memory"].items():
        about = results["scenarios"][name]["about"]
        lines = {way: [(time, size / 1e6) for time, size in samples] for way, samples in series.items()}
        yield line_chart(f"K/V memory: {about}", "seconds", "MB", lines)
    speeds = {way: [(x, row["tokens_per_s"]) for x, row in rows] for way, rows in by_length.items()}
    yield line_chart("Decode speed", "tokens of context", "tokens/s", speeds, logarithmic=True)
    waits = {way: [(x, row["first_token_s"]) for x, row in rows] for way, rows in by_length.items()}
    yield line_chart("Time to the first token", "tokens of prompt", "seconds", waits, logarithmic=True)
    ways = list(dict.fromkeys(row["way"] for row in results["batch"]))
    sweep = {way: [(row["rows"], row["tokens_per_s"]) for row in results["batch"] if row["way"] == way] for way in ways}
    yield line_chart("Throughput of a batch", "requests at once", "tokens/s", sweep, logarithmic=True)


def _figures(results: dict[str, Any]) -> str:
    rows = [
        (figure.case, figure.quantity, figure.way, shown(base), shown(figure.value), f"x{factor:.2f}")
        for figure, base, factor in against_stock(results)
    ]
    return _table(("case", "quantity", "way", "stock", "paged", "ratio"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>" if items else "<p>Nowhere.</p>"
