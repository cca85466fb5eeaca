"""``tinykv demo``, on a tiny model in place of the fetched one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinykv_plugin.demo import fetch
from tinykv_plugin.demo import run as demo_run
from tinykv_plugin.errors import DemoModelError

Call = Callable[..., Any]


def figures(output: str) -> list[list[str]]:
    """The rows of figures: what, dense, paged."""
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
    return [row[1:] for row in cells if len(row) == 4]


def test_dense_and_paged_are_compared(tinykv: Call, tiny_model_dir: Path) -> None:
    done = tinykv("demo", "--model", str(tiny_model_dir), "--max-tokens", "12", "--kv-page-size", "8")
    assert done.code == 0, done.err
    assert all(prompt in done.out for prompt in demo_run.SHORT_PROMPTS)
    assert done.out.endswith("the tokens of all 7 prompts are equal, dense and paged\n")
    assert "differ" not in done.out
    # 4 layers, 2 heads of 16 dimensions, float32, K and V; a dense cache starts with 256 tokens.
    one, _, waste, _, _, six, *_ = figures(done.out)
    assert one[:2] == ["K/V bytes held", "256 KiB"]
    assert six[1] == "1.50 MiB"
    dense_waste, paged_waste = (float(cell.removesuffix("%")) for cell in waste[1:])
    assert paged_waste < dense_waste


def test_the_model_is_as_before_afterwards(tiny_model_dir: Path) -> None:
    from mlx_lm import load
    from mlx_lm.models.cache import KVCache, make_prompt_cache

    from tinykv_plugin.config import KVCacheConfig

    model, tokenizer = load(str(tiny_model_dir))
    advanced: list[int] = []
    comparisons = demo_run.compare(model, tokenizer, KVCacheConfig(), 4, advanced.append)
    assert sum(advanced) == demo_run.tokens_to_do(4)
    assert all(comparison.equal for comparison in comparisons)
    assert type(make_prompt_cache(model)[0]) is KVCache


def test_without_a_chat_template_the_prompt_itself_is_used(tinykv: Call, tiny_model_dir: Path, tmp_path: Path) -> None:
    import json
    import shutil

    folder = tmp_path / "plain"
    shutil.copytree(tiny_model_dir, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert tinykv("demo", "--model", str(folder), "--max-tokens", "4").code == 0


def test_different_tokens_are_shown_and_fail(
    tinykv: Call, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_prompts = demo_run.run_prompts

    def wrong_when_paged(*args: Any) -> demo_run.Run:
        run = run_prompts(*args)
        if args[4] is not None:
            run.tokens[-1][-1] += 1
            run.texts[-1] = "something else"
        return run

    monkeypatch.setattr(demo_run, "run_prompts", wrong_when_paged)
    done = tinykv("demo", "--model", str(tiny_model_dir), "--max-tokens", "4")
    assert done.code == 1
    assert "paged: something else" in done.out
    assert "the tokens differ between dense and paged" in done.out


def test_the_model_is_fetched_unless_one_is_given(
    tinykv: Call, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "fetch_model", lambda: tiny_model_dir)
    assert tinykv("demo", "--max-tokens", "2").code == 0


def test_a_model_that_cannot_be_fetched_is_one_line(tinykv: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise DemoModelError("the model can't be had; use --model PATH")

    monkeypatch.setattr(fetch, "fetch_model", fail)
    done = tinykv("demo")
    assert done.code == 1
    assert done.err == "tinykv: error: the model can't be had; use --model PATH\n"


def test_without_a_network_the_remedy_is_one_line(python: Call, tmp_path: Path) -> None:
    cut_off = {"TINYKV_CACHE_DIR": str(tmp_path / "cache"), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    done = python("-m", "tinykv_plugin", "demo", env=cut_off)
    assert done.code == 1
    assert done.err.startswith("tinykv: error: ")
    assert done.err.count("\n") == 1
    assert "--model" in done.err


@pytest.mark.parametrize(("value", "message"), [("0", "0 is not a number of at least 1"), ("x", "x is not a number")])
def test_max_tokens_is_a_positive_number(tinykv: Call, value: str, message: str) -> None:
    done = tinykv("demo", "--max-tokens", value)
    assert done.code == 2
    assert "tinykv demo: error: argument --max-tokens" in done.err
    assert message in done.err
