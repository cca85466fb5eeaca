"""``tinykv inspect``: the plan and the sizes, without reading weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinykv_plugin.cli.inspect import plan_table
from tinykv_plugin.protocols import LayerPlan

Call = Callable[..., Any]


def rows(output: str) -> dict[str, list[str]]:
    """The cells of the tables' rows, by the first."""
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]
    return {first: rest for first, *rest in cells}


@pytest.fixture(scope="session")
def window_model_dir(save_model: Call, tiny_llama: Call, known_settings: Call) -> Path:
    """Every other layer has a window of 64 tokens."""
    kinds = ["full_attention", "sliding_attention"] * 3
    model = tiny_llama(num_hidden_layers=6, layer_types=kinds, sliding_window=64)
    return Path(save_model(model, known_settings(model.args), "window"))


def test_a_plain_model(tinykv: Call, tiny_model_dir: Path) -> None:
    done = tinykv(
        "inspect", str(tiny_model_dir), "--kv-page-size", "16", "--kv-memory", "64MiB", "--kv-attention", "gather"
    )
    assert done.code == 0, done.err
    found = rows(done.out)
    assert found["0-3"][:5] == ["full", "", "gather", "gather", "float32"]
    # 4 layers, 2 heads of 16 dimensions, float32, K and V.
    assert found["a token"] == ["1.00 KiB"]
    assert found["a page of 16 tokens"] == ["16.0 KiB"]
    assert found["the budget"] == ["64.0 MiB"]
    assert found["longest request"] == ["65,536 tokens"]
    assert found["chats of 4,096 tokens"] == ["16"]
    assert found["such a chat in pages"] == ["4.00 MiB"]
    assert found["such a chat in mlx-lm's own caches"] == ["4.00 MiB"]


def test_a_model_with_windows(tinykv: Call, window_model_dir: Path) -> None:
    argv = ["--kv-page-size", "16", "--kv-memory", "1MiB", "--kv-rewind", "0"]
    done = tinykv("inspect", str(window_model_dir), *argv)
    assert done.code == 0, done.err
    found = rows(done.out)
    assert found["0"][:2] == ["full", ""]
    assert found["1"][:2] == ["window", "64"]
    # 3 layers of each kind: 256 B a token and layer, 12 KiB a page and group; a window of 64 touches 5 pages.
    assert found["a token"] == ["1.50 KiB"]
    assert found["longest request"] == [f"{(1024 - 5 * 12) // 12 * 16:,} tokens"]
    assert found["chats of 4,096 tokens"] == ["0"]
    assert found["such a chat in mlx-lm's own caches"] == ["3.05 MiB"]


def test_the_budget_is_that_of_the_mac_in_question(tinykv: Call, tiny_model_dir: Path) -> None:
    """Half of the three quarters that a model may use of 36 GiB; or what is asked for."""
    mac = ("inspect", str(tiny_model_dir), "--memory", "36GiB")
    assert rows(tinykv(*mac).out)["the budget (memory = 0.5)"] == ["13.5 GiB"]
    assert rows(tinykv(*mac, "--kv-memory", "2GiB").out)["the budget"] == ["2.00 GiB"]


def test_a_limit_of_pages_counts(tinykv: Call, tiny_model_dir: Path) -> None:
    found = rows(tinykv("inspect", str(tiny_model_dir), "--kv-page-size", "16", "--kv-max-pages", "600").out)
    assert found["longest request"] == ["9,600 tokens"]
    assert found["chats of 4,096 tokens"] == ["2"]


def test_a_bounded_cache_never_ends(tinykv: Call, tiny_model_dir: Path) -> None:
    found = rows(tinykv("inspect", str(tiny_model_dir), "--kv-max-kv-size", "512", "--kv-memory", "64MiB").out)
    assert found["longest request"] == ["no limit: all layers keep a bounded number"]
    assert int(found["chats of 4,096 tokens"][0]) > 100


def test_dense_has_no_sizes(tinykv: Call, tiny_model_dir: Path) -> None:
    done = tinykv("inspect", str(tiny_model_dir), "--kv-cache", "dense")
    assert done.code == 0
    assert rows(done.out)["0-3"][0] == "dense"
    assert "no layer of this model is kept in pages of ours" in done.out


def test_weights_are_not_read(tinykv: Call, tiny_model_dir: Path) -> None:
    import mlx.core as mx

    mx.reset_peak_memory()
    before = mx.get_active_memory()
    assert tinykv("inspect", str(tiny_model_dir)).code == 0
    read = mx.get_peak_memory() - before
    assert read < (tiny_model_dir / "model.safetensors").stat().st_size / 20


def test_a_broken_weights_file_is_one_line(tinykv: Call, tiny_model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model_dir / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((tiny_model_dir / "model.safetensors").read_bytes()[:-100])
    done = tinykv("inspect", str(tmp_path))
    assert done.code == 1
    assert done.err.startswith(f"tinykv: error: the model in {tmp_path} can't be loaded: RuntimeError")
    assert done.err.count("\n") == 1


def test_neighbours_served_alike_are_one_row() -> None:
    plan = [LayerPlan(index, "full", "direct", "cpu", "") for index in range(3)]
    plan += [LayerPlan(3, "window", "gather", "gather", "[why]", 64)]
    plan += [LayerPlan(index, "full", "direct", "cpu", "") for index in (4, 5)]
    table = plan_table(plan, "model")
    assert list(table.columns[0].cells) == ["0-2", "3", "4-5"]
    assert table.row_count == 3


def test_few_bits(tinykv: Call, wide_model_dir: Path) -> None:
    """Beside 4,096 rounded tokens a request has open pages: its last one, and one for a rewind of 16 tokens."""
    done = tinykv("inspect", str(wide_model_dir), "--kv-page-size", "16", "--kv-memory", "64MiB", "--kv-bits", "4")
    assert done.code == 0, done.err
    found = rows(done.out)
    # 4 layers, 2 heads of 32 elements, K and V: 16 bytes each, scale and bias; 128 bytes in float32.
    assert found["a token"] == ["384 B"]
    assert found["the page being filled, besides"] == ["32.0 KiB"]
    assert found["such a chat in pages"] == [f"{(4096 * 384 + 2 * 2**15) / 2**20:.2f} MiB"]
