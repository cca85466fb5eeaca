"""``tinykv bench``: what it measures, writes and compares."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import xml.dom.minidom
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinykv_plugin.bench import chart, results, suite
from tinykv_plugin.bench.batches import Request
from tinykv_plugin.bench.estimate import estimate
from tinykv_plugin.bench.report import charts, report
from tinykv_plugin.cli.bench import print_results
from tinykv_plugin.cli.console import console
from tinykv_plugin.cli.failures import CommandError

Call = Callable[..., Any]

TINY = suite.Plan((8, 24), 6, 1, (1, 2), 6, 6, 64, 600)


@pytest.fixture(scope="module")
def measured(tiny_llama: Call) -> dict[str, Any]:
    said: list[str] = []
    saved: list[int] = []
    found = suite.run_suite(
        tiny_llama(), "tiny", TINY, said.append, {"page_size": 8}, lambda results: saved.append(len(results["not_run"]))
    )
    assert said == suite.case_names(TINY)
    assert saved == [*range(len(said) - 1, -1, -1), 0]  # one case after the other is in it
    loaded: dict[str, Any] = json.loads(json.dumps(found))
    return loaded


def test_everything_is_measured_in_every_way(measured: dict[str, Any]) -> None:
    ways = measured["ways"]
    assert ways[:2] == ["stock", "gather"]
    assert {(row["way"], row["prompt"]) for row in measured["single"]} == {(way, n) for way in ways for n in (8, 24)}
    assert {(row["way"], row["rows"]) for row in measured["batch"]} == {
        (way, n) for way in ("stock", ways[-1]) for n in (1, 2)
    }
    assert set(measured["scenarios"]) == set(measured["memory"]) == {"a", "b", "c", "d"}
    for samples in measured["memory"].values():
        for line in samples.values():
            times = [time for time, _ in line]
            assert times == sorted(times)
            assert max(size for _, size in line) > 0
    assert measured["machine"]["mlx-lm"]
    assert measured["settings"] == {"page_size": 8}
    # 4 layers, 2 heads of 16 dimensions, float32, K and V.
    assert measured["kv_bytes_per_token"] == 1024


def test_answers_are_those_of_stock(measured: dict[str, Any]) -> None:
    assert results.differing(measured) == []
    other = copy.deepcopy(measured)
    other["single"][-1]["equal"] = False
    other["batch"][-1]["equal"] = False
    other["scenarios"]["a"]["equal"] -= 1
    assert results.differing(other) == [
        f"prompt 24 ({measured['ways'][-1]})",
        "batch of 2",
        "prompts of very different lengths: 1 of 3",
    ]


def test_only_where_nothing_may_be_lost_is_a_difference_a_failure(measured: dict[str, Any], capsys: Any) -> None:
    other = copy.deepcopy(measured)
    other["single"][-1]["equal"] = False
    assert print_results(console(), other) == 1
    assert "answers differ from stock's: prompt 24" in capsys.readouterr().out
    assert print_results(console(), other | {"settings": {"bits": "8"}}) == 0
    assert "as they may with bits" in capsys.readouterr().out


def test_losing_cases_are_named(measured: dict[str, Any]) -> None:
    slow = copy.deepcopy(measured)
    for row in slow["single"]:
        row["first_token_s"], row["tokens_per_s"] = (1.0, 10.0) if row["way"] == "stock" else (4.0, 20.0)
    slow["batch"] = [
        {"way": "stock", "rows": 7, "tokens_per_s": 1000.0, "step_ms": 1.0, "peak_bytes": 1},
        {"way": "gather", "rows": 7, "tokens_per_s": 996.0, "step_ms": 1.1, "peak_bytes": 1},
    ]
    losing = results.losing(slow)
    assert [line for line in losing if "batch of 7" in line] == ["gather: step ms of batch of 7: x0.91"]
    assert "gather: first token s of prompt 8: x0.25" in losing
    assert not [line for line in losing if re.search(r"tokens/s of prompt \d", line)]


@pytest.mark.parametrize(
    ("value", "text"), [(0.00963, "0.00963"), (12.34, "12.3"), (999.6, "1,000"), (12345, "12,345")]
)
def test_figures_are_readable(value: float, text: str) -> None:
    assert results.shown(value) == text


def test_a_way_has_one_colour_in_all_charts(measured: dict[str, Any]) -> None:
    run = measured | {"ways": ["stock", "gather", "other"], "memory": {}}
    run["single"] = [row | {"way": way} for way in run["ways"] for row in measured["single"][:1]]
    run["batch"] = [row | {"way": way} for way in ("stock", "other") for row in measured["batch"][:1]]
    for figure in charts(run):
        legend = dict(re.findall(r'<i class="c(\d)"></i>([^<]*)<', figure))
        assert (legend["0"], legend["1"], legend.get("2", "gather")) == ("stock", "other", "gather")


@pytest.mark.parametrize(
    ("quantity", "old", "new", "better"),
    [("tokens/s", 10, 20, 2), ("first token s", 10, 20, 0.5), ("K/V peak MB", 10, 5, 2), ("tokens/s", 0, 5, 1)],
)
def test_a_gain_above_1_is_better(quantity: str, old: float, new: float, better: float) -> None:
    assert results.gain(quantity, old, new) == better


def test_two_runs_are_compared(measured: dict[str, Any], tinykv: Call, tmp_path: Path) -> None:
    faster = copy.deepcopy(measured)
    for row in faster["single"]:
        row["tokens_per_s"] *= 2
    faster["machine"]["device"] = "gpu, Another"
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, run in zip(paths, (measured, faster), strict=True):
        path.write_text(json.dumps(run), encoding="utf-8")
    done = tinykv("bench", "--compare", *map(str, paths))
    assert done.code == 0, done.err
    (line,) = (line for line in done.out.splitlines() if "prompt 24" in line and "tokens/s" in line and "stock" in line)
    assert "x2.00" in line
    assert f"not the same: device: {measured['machine']['device']} and gpu, Another" in done.out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "format None is not known; this tinykv reads results of format 1"),
        ('{"format": 99}', "format 99 is not known"),
        ("[1]", "format None is not known"),
        ('{"format": 1, "model": "m"}', "the results have no machine, plan, settings, ways, single"),
        ("oops", "can't be read as results of tinykv bench"),
    ],
)
def test_what_is_no_result_is_one_line(tinykv: Call, tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text, encoding="utf-8")
    done = tinykv("bench", "--compare", str(path), str(path))
    assert done.code == 1
    assert f"tinykv: error: {path}: " in done.err
    assert said in done.err
    assert "can't be read" in tinykv("bench", "--compare", str(tmp_path / "none"), str(path)).err


def test_the_report_is_one_file_that_loads_nothing(measured: dict[str, Any]) -> None:
    page = report(measured)
    assert page.count("<svg ") == 4 + 3
    for about in ("K/V memory: ", "Decode speed", "Time to the first token", "Throughput of a batch"):
        assert f"<figcaption>{about}" in page
    for part in page.split("<svg ")[1:]:
        xml.dom.minidom.parseString("<svg " + part.split("</svg>")[0] + "</svg>")
    assert "<script" not in page
    assert "src=" not in page
    assert "href=" not in page
    assert page.replace("http://www.w3.org/2000/svg", "").count("http") == 0
    assert "Every answer is the one of stock mlx-lm." in page


def test_names_in_the_report_are_text(measured: dict[str, Any]) -> None:
    page = report(measured | {"model": "<b>&"})
    assert "<b>" not in page
    assert "&lt;b&gt;&amp;" in page


def test_the_command_writes_both_files(
    tinykv: Call, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "QUICK", TINY)
    done = tinykv(
        "bench", "--model", str(tiny_model_dir), "--quick", "--output", str(tmp_path / "run"), "--kv-page-size=8"
    )
    assert done.code == 0, done.err
    assert "every answer is the one of stock mlx-lm" in done.out
    assert results.read(tmp_path / "run.json")["settings"] == {"page_size": "8"}
    assert (tmp_path / "run.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert f"written: {tmp_path / 'run.json'}, {tmp_path / 'run.html'}" in done.out.replace("\n", "")


@pytest.fixture
def stopped_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, BaseException], None]:
    """The tiny plan, ended by an error when a scenario starts."""

    def stop(letter: str, error: BaseException) -> None:
        original = suite.batches.compare

        def compare(model: Any, name: str, *arguments: Any, **settings: Any) -> Any:
            if name == letter:
                raise error
            return original(model, name, *arguments, **settings)

        monkeypatch.setattr(suite, "FULL", TINY)
        monkeypatch.setattr(suite.batches, "compare", compare)

    return stop


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (CommandError("no memory"), 1)])
def test_a_run_that_ends_early_leaves_what_it_measured(
    error: BaseException,
    code: int,
    stopped_at: Callable[[str, BaseException], None],
    tinykv: Call,
    tiny_model_dir: Path,
    tmp_path: Path,
) -> None:
    stopped_at("b", error)
    done = tinykv("bench", "--model", str(tiny_model_dir), "--output", str(tmp_path / "run"))
    assert done.code == code
    assert (
        f"tinykv: ended early; the figures so far are in {tmp_path / 'run.json'}, {tmp_path / 'run.html'}" in done.err
    )
    assert done.out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.html", "run.json"]
    partial = results.read(tmp_path / "run.json")
    missing = list(suite.SCENARIOS.values())[1:]
    assert results.not_run(partial) == [f"{name}: the run ended before it" for name in missing]
    assert list(partial["scenarios"]) == ["a"]
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert "Not everything was run: 3 of the cases are missing." in page
    assert "<h2>Not run</h2>" in page
    assert all(f"<li>{name}: the run ended before it</li>" in page for name in missing)


def test_an_interrupt_before_the_first_figure_writes_nothing(
    tinykv: Call, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    (tmp_path / "run.json").write_text("of an earlier run", encoding="utf-8")
    monkeypatch.setattr(suite.single, "compare", interrupted)
    done = tinykv("bench", "--model", str(tiny_model_dir), "--output", str(tmp_path / "run"))
    assert done.code == 130
    assert "figures so far" not in done.err
    assert (tmp_path / "run.json").read_text(encoding="utf-8") == "of an earlier run"


def test_a_partial_run_is_compared_by_what_it_has(measured: dict[str, Any], tinykv: Call, tmp_path: Path) -> None:
    partial = copy.deepcopy(measured)
    partial["single"] = [row for row in partial["single"] if row["prompt"] == 8]
    partial |= {"batch": [], "scenarios": {}, "memory": {}}
    partial["not_run"] = dict.fromkeys(suite.case_names(TINY)[1:], suite.ENDED)
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, run in zip(paths, (measured, partial), strict=True):
        path.write_text(json.dumps(run), encoding="utf-8")
    for pair, letter in ((paths, "B"), (paths[::-1], "A")):
        done = tinykv("bench", "--compare", *map(str, pair))
        assert done.code == 0, done.err
        table = done.out[: done.out.index("ratios above 1")]
        assert "prompt 8" in table
        assert "prompt 24" not in table
        assert f"not the same: {letter} has no prompt 24: the run ended before it" in done.out
    assert print_results(console(), partial) == 0
    assert report(partial).count("nothing was measured") == 1  # the sweep


def test_cases_of_another_size_are_not_compared(measured: dict[str, Any]) -> None:
    other = copy.deepcopy(measured)
    other["plan"] |= {"row_prompt": 128, "scale": 2}
    assert {figure.case for figure, _, _ in results.compare(measured, other)} == {"prompt 8", "prompt 24"}
    assert results.differences(measured, other) == [
        "batch: row_prompt 6, row_tokens 6 and row_prompt 128, row_tokens 6, so these are not compared",
        "scenarios: scale 64 and scale 2, so these are not compared",
    ]
    assert results.differences(measured, measured) == []


def test_what_would_take_too_long_is_left_out_and_named(tiny_llama: Call, capsys: Any) -> None:
    short = dataclasses.replace(TINY, seconds=1e-6, repeats=3)
    found = suite.run_suite(tiny_llama(), "tiny", short, lambda name: None, {})
    assert {(row["prompt"], row["runs"]) for row in found["single"]} == {(8, 1)}  # no second turn either
    assert not found["batch"]
    assert not found["scenarios"]
    assert list(found["not_run"]) == suite.case_names(TINY)[1:]
    for reason in found["not_run"].values():
        assert re.fullmatch(r"left out, it would take about \d+ s and may take 0 s", reason)
    assert print_results(console(), found) == 0
    assert "not run: batch of 1: left out" in capsys.readouterr().out


def test_lengths_are_repeated_while_there_is_time(tiny_llama: Call) -> None:
    found = suite.run_suite(
        tiny_llama(), "tiny", dataclasses.replace(TINY, repeats=3, rows=()), lambda name: None, {"attention": "gather"}
    )
    assert {row["runs"] for row in found["single"]} == {3}


def test_time_is_estimated_from_what_was_measured() -> None:
    def row(way: str, prompt: int, first: float) -> dict[str, Any]:
        return {"way": way, "prompt": prompt, "first_token_s": first, "tokens_per_s": 10.0}

    found: dict[str, Any] = {"single": [], "batch": []}

    def needed(*requests: Request, ways: tuple[str, ...]) -> float | None:
        return estimate(found, requests, ways)

    long = Request([1] * 2048, 20)
    assert needed(long, ways=("stock",)) is None
    found["single"] = [row("stock", 512, 1.0), row("stock", 1024, 10.0), row("cpu", 1024, 5.0)]
    # Attention goes with the square: 2,048 tokens are three times the work of 1,024, and these 8/3 of 512.
    assert needed(long, ways=("stock",)) == pytest.approx(10 * 3 + 2)
    assert needed(long, ways=("stock", "cpu")) == pytest.approx(30 + 2 + 5 * 3 + 2)
    short = Request([1] * 512, 20)
    assert needed(short, ways=("stock",)) == pytest.approx(1 + 2)
    # Stock pads what arrives together; pages don't.
    assert needed(long, short, ways=("stock",)) == pytest.approx(2 * 30 + 4)
    assert needed(long, short, ways=("cpu",)) == pytest.approx(15 + 5 * 3 / 8 + 4)
    assert needed(long, Request([1] * 512, 20, after=2), ways=("stock",)) == pytest.approx(30 + 1 + 4)
    # A stored start is computed once.
    shared = [Request([1] * 512, 20, prefix=[2] * 1024) for _ in range(3)]
    assert needed(*shared, ways=("stock",)) == pytest.approx(10 + 3 + 6)
    # A batch answers faster than one request.
    found["batch"] = [{"way": "stock", "tokens_per_s": 40.0}]
    assert needed(*shared, ways=("stock",)) == pytest.approx(10 + 3 + 1.5)


def test_help_tells_how_long_it_takes(tinykv: Call) -> None:
    said = " ".join(tinykv("bench", "--help").out.split())
    assert f"Takes at most about {suite.FULL.seconds / 60:.0f} minutes" in said
    assert f"a minute or so, at most about {suite.QUICK.seconds / 60:.0f}" in said


def test_a_place_to_write_to_is_looked_at_first(tinykv: Call, tmp_path: Path) -> None:
    done = tinykv("bench", "--output", str(tmp_path / "none" / "run"))
    assert done.code == 1
    assert f"--output {tmp_path / 'none' / 'run'}: there is no folder {tmp_path / 'none'}" in done.err


@pytest.mark.parametrize(
    ("top", "last"), [(1, 1), (7, 8), (0.03, 0.03), (99, 100), (101, 125), (12345, 12500), (2.5, 2.5)]
)
def test_ticks_are_round_and_few(top: float, last: float) -> None:
    ticks = chart.nice_ticks(top)
    assert ticks[0] == 0
    assert ticks[-1] >= top
    assert ticks[-1] == pytest.approx(last)
    assert 2 <= len(ticks) <= chart.MOST_TICKS


def test_points_are_where_their_values_are() -> None:
    svg = chart.line_chart("t", "x", "y", {"a": [(1, 0), (2, 5), (4, 10)]}, logarithmic=True)
    (points,) = [part.split('"')[0] for part in svg.split('points="')[1:]]
    places = [tuple(map(float, point.split(","))) for point in points.split()]
    (x1, y1), (x2, y2), (x3, y3) = places
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)  # each twice the one before
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.2)
    assert y1 == chart.HEIGHT - chart.BOTTOM
    assert y3 == chart.TOP
    assert "nothing was measured" in chart.line_chart("t", "x", "y", {"a": []})
