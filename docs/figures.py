"""Tables and charts of benchmarks.md, from the raw results in docs/data. ``python docs/figures.py`` renews them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGE = FOLDER / "benchmarks.md"
DATA = FOLDER / "data" / "smollm2-linux.json"
MARKED = re.compile(r"(<!-- figures -->\n).*(<!-- /figures -->)", re.DOTALL)

STYLE = """<style>
.axis { fill: #5a6576; font: 12px system-ui, sans-serif; } .grid { stroke: #d9dde3; }
polyline { fill: none; stroke-width: 2.5; } circle { fill: #fff; stroke-width: 2; }
.c0 { stroke: #6b7280; } .c1 { stroke: #0072b2; } .c2 { stroke: #d55e00; }
text.c0 { fill: #6b7280; stroke: none; } text.c1 { fill: #0072b2; stroke: none; }
text.c2 { fill: #d55e00; stroke: none; }
</style><rect width="100%" height="100%" fill="#fff"/>"""

CHARTS = {"bench-memory": ("K/V memory: ", 1), "bench-throughput": ("Throughput", 0)}


def tables(results: dict[str, Any]) -> str:
    """Everything between the page's markers."""
    from tinykv_plugin.bench.results import against_stock, differing, losing, not_run, shown
    from tinykv_plugin.units import format_bytes

    machine = results["machine"]
    facts = (
        f"{results['model']} on {machine['platform']}, {machine['cores']} cores, {format_bytes(machine['memory'])} of "
        f"memory, mlx {machine['mlx']}, mlx-lm {machine['mlx-lm']}, BLAS {machine['blas']}; {machine['created'][:10]}."
    )
    lines = [facts, "", "| case | quantity | way | stock | paged | ratio |", "| --- | --- | --- | ---: | ---: | ---: |"]
    lines += [
        f"| {figure.case} | {figure.quantity} | {figure.way} | {shown(base)} | {shown(figure.value)} | x{factor:.2f} |"
        for figure, base, factor in against_stock(results)
    ]
    wrong = differing(results)
    lines += [
        "",
        "Every answer was the one of stock mlx-lm." if not wrong else f"Answers differed: {'; '.join(wrong)}.",
    ]
    lines += ["", "Worse than stock:", "", *(f"- {line}" for line in losing(results)), ""]
    missing = not_run(results)
    if missing:
        lines += ["Not run:", "", *(f"- {line}" for line in missing), ""]
    return "\n".join(lines)


def charts(results: dict[str, Any]) -> dict[str, str]:
    """Pictures by name, with a legend inside."""
    from tinykv_plugin.bench.report import charts

    found = list(charts(results))
    pictures = {}
    for name, (about, number) in CHARTS.items():
        figure = [figure for figure in found if about in figure][number]
        svg = figure[figure.index("<svg") : figure.index("</svg>")]
        legend = re.findall(r'<li><i class="(c\d)"></i>([^<]*)</li>', figure)
        for place, (kind, label) in enumerate(legend):
            svg += f'<text class="axis {kind}" x="{80 + 90 * place}" y="14">{label}</text>'
        pictures[name] = svg.replace("<title>", STYLE + "<title>", 1) + "</svg>\n"
    return pictures


def renewed(page: str) -> str:
    """``page`` with what is between its markers made from the data."""
    results = json.loads(DATA.read_text(encoding="utf-8"))
    return MARKED.sub(lambda found: found[1] + tables(results) + found[2], page)


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    for name, svg in charts(json.loads(DATA.read_text(encoding="utf-8"))).items():
        (FOLDER / "images" / f"{name}.svg").write_text(svg, encoding="utf-8")
