"""``tinykv inspect --memory …``: what would fit."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinykv_plugin.cli import fit
from tinykv_plugin.cli.capacity import GroupSize
from tinykv_plugin.cli.fit import Machine, Stored, Wish, advice, fit_table

Call = Callable[..., Any]
GIB = 2**30

FULL = GroupSize(window=None, held=None, page_size=32, page_bytes=32 * 1024, page_limit=5)
HALF = GroupSize(window=None, held=None, page_size=32, page_bytes=16 * 1024, page_limit=5)


def cells(output: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if "│" in line]


def columns(table: Any) -> dict[str, list[str]]:
    return {str(column.header): [str(cell) for cell in column.cells] for column in table.columns}


def test_what_a_mac_may_use() -> None:
    assert Machine.mac(16 * GIB).usable == pytest.approx(10.67 * GIB, rel=0.01)
    assert Machine.mac(36 * GIB).usable == 27 * GIB
    assert Machine.mac(64 * GIB).usable == 48 * GIB
    assert Machine.mac(36 * GIB).left_for_kv(20 * GIB) == int(27 * GIB * 0.95) - 20 * GIB
    assert Machine.mac(36 * GIB).left_for_kv(30 * GIB) == 0


def test_one_row_for_each_way_and_page_size() -> None:
    found = columns(
        fit_table([Stored("float16", [FULL]), Stored("8 bits", [HALF], "--kv-bits 8")], Wish(1000, 4), 4 * 2**20)
    )
    assert found["K/V"] == ["float16", "", "", "", "8 bits", "", "", "", "mlx-lm's own"]
    assert found["page"] == ["16", "32", "64", "128", "16", "32", "64", "128", ""]
    assert found["a token"] == ["1.00 KiB"] * 4 + ["512 B"] * 4 + ["1.00 KiB"]
    # 63, 32, 16 and 8 pages.
    assert found["a request"][:4] == ["1008 KiB", "1.00 MiB", "1.00 MiB", "1.00 MiB"]
    assert found["all"][3] == "4.00 MiB"
    assert found["fits"] == ["yes"] * 9
    assert found["requests that fit"] == ["4", "4", "4", "4", "8", "8", "8", "8", "4"]
    assert found["longest context"][:4] == ["1,024"] * 4
    short = columns(fit_table([Stored("float16", [FULL])], Wish(1000, 5), 4 * 2**20))
    assert short["fits"] == ["no"] * 5


def test_advice_names_the_flags_that_do_it() -> None:
    both = [Stored("float16", [FULL]), Stored("8 bits", [HALF], "--kv-bits 8")]
    assert advice(both, Wish(1000, 4), 4 * 2**20, 32) == (
        "4 requests of 1,000 tokens fit with --kv-memory 4MiB --kv-page-size 32"
    )
    assert advice(both, Wish(1000, 6), 4 * 2**20, 32) == (
        "6 requests of 1,000 tokens fit with --kv-memory 3MiB --kv-page-size 32 --kv-bits 8"
    )
    assert advice(both, Wish(1000, 10), 4 * 2**20, 32) == (
        "10 requests of 1,000 tokens don't fit: at most 8 of them, or 10 of 800 tokens with --kv-bits 8"
    )
    assert advice(both, Wish(1000, 1), 2**20, 32) == (
        "1 request of 1,000 tokens fits with --kv-memory 1MiB --kv-page-size 32"
    )
    assert advice(both[:1], Wish(2000, 1), 2**20, 32) == "1 request of 2,000 tokens doesn't fit: 1 of 1,024 tokens"
    assert advice(both, Wish(1000, 1), 0, 32).startswith("the weights alone don't fit")


@pytest.mark.parametrize(("text", "count"), [("4096", 4096), ("32k", 32768), ("1M", 2**20), ("32,768", 32768)])
def test_numbers_of_tokens(text: str, count: int) -> None:
    assert fit.tokens(text) == count


@pytest.mark.parametrize("text", ["", "0", "many", "3.5k", "-1", "32kb"])
def test_what_is_no_number_of_tokens(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="such as 4096 or 32k"):
        fit.tokens(text)


@pytest.fixture(scope="session")
def llama_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shapes of Llama 3.1 8B in 4 bits, as config.json alone."""
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "quantization": {"group_size": 64, "bits": 4},
    }
    path = tmp_path_factory.mktemp("llama") / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def test_a_configuration_alone_is_enough(tinykv: Call, llama_8b: Path) -> None:
    import mlx.core as mx

    before = mx.get_active_memory()
    done = tinykv("inspect", str(llama_8b), "--memory", "36GiB", "--context", "32k", "--concurrency", "4")
    assert done.code == 0, done.err
    assert mx.get_active_memory() - before < 2**20  # nothing is computed
    # 8.03 billion weights of 4.5 bits.
    assert "36.0 GiB of memory, of which a model may use 27.0 GiB: 4.21 GiB of weights" in done.out
    rows = [row for row in cells(done.out) if len(row) == 8]
    # 32 layers of 8 heads of 128 dimensions, K and V, bfloat16.
    assert rows[0][:6] == ["bfloat16", "16", "128 KiB", "4.00 GiB", "16.0 GiB", "yes"]
    # 8 bits and, for each 64 of them, a scale and a bias of 16.
    assert rows[4][1:6] == ["16", "68.0 KiB", "2.12 GiB", "8.50 GiB", "yes"]
    # And with 4 bits two open pages of 2 MiB.
    assert rows[8][1:6] == ["16", "36.0 KiB", "1.13 GiB", "4.52 GiB", "yes"]
    assert "4 requests of 32,768 tokens fit with --kv-memory 16384MiB --kv-page-size 32" in done.out
    assert done.out.count("\n") < 60


def test_the_folder_of_a_configuration_will_do(tinykv: Call, llama_8b: Path) -> None:
    done = tinykv("inspect", str(llama_8b.parent), "--memory", "8GiB", "--concurrency", "64", "--context", "200k")
    assert done.code == 0, done.err
    assert re.search(
        r"64 requests of 204,800 tokens don't fit: not one does; 64 of \d+ tokens with --kv-bits 4", done.out
    )
    assert "the model was made for contexts of 131,072 tokens" in done.out


def test_weights_are_those_of_the_files(tinykv: Call, tiny_model_dir: Path) -> None:
    done = tinykv("inspect", str(tiny_model_dir), "--context", "100")
    assert done.code == 0, done.err
    found = re.search(r": (\d+) KiB of weights", done.out)
    assert found
    assert int(found[1]) == pytest.approx((tiny_model_dir / "model.safetensors").stat().st_size / 1024, rel=0.03)
    assert "1 request of 100 tokens fits with --kv-memory" in done.out


def test_a_model_is_named_by_its_folder_or_file_and_its_kind(
    tinykv: Call, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_model_dir)
    config = json.loads((tiny_model_dir / "config.json").read_text(encoding="utf-8"))
    for argument, name in (
        (str(tiny_model_dir), tiny_model_dir.name),
        (".", tiny_model_dir.name),
        ("config.json", "config.json"),
    ):
        assert tinykv("inspect", argument).out.splitlines()[0].strip() == f"{name}: {config['model_type']}"


def test_why_fewer_bits_are_not_in_the_table_is_said(tinykv: Call, llama_8b: Path, tmp_path: Path) -> None:
    assert "fewer bits" not in tinykv("inspect", str(llama_8b), "--context", "100").out
    config = json.loads(llama_8b.read_text(encoding="utf-8")) | {"head_dim": 80}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    done = tinykv("inspect", str(tmp_path), "--context", "100")
    assert "fewer bits are not in the table: bits: 4 is not possible here" in done.out
    assert "bits in groups" not in done.out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--memory", "36"], "'36' is less than a machine has; write it like 36GiB"),
        (["--memory", "lots"], "'lots' is not a size such as 4GiB"),
        (["--context", "long"], "'long' is no number of tokens such as 4096 or 32k"),
        (["--concurrency", "0"], "0 is not a number of at least 1"),
    ],
)
def test_wrong_wishes_are_one_line(tinykv: Call, llama_8b: Path, flags: list[str], said: str) -> None:
    done = tinykv("inspect", str(llama_8b), *flags)
    assert done.code == 2
    assert f"argument {flags[0]}: {said}" in done.err


def test_a_path_that_is_not_there(tinykv: Call, tmp_path: Path) -> None:
    done = tinykv("inspect", str(tmp_path / "nothing"))
    assert done.code == 1
    assert "is no folder and no file; give a model's folder or its config.json" in done.err


def test_a_folder_without_a_configuration(tinykv: Call, tmp_path: Path) -> None:
    done = tinykv("inspect", str(tmp_path))
    assert done.code == 1
    assert f"there is no config.json in {tmp_path}" in done.err
