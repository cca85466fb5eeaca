import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinykv_plugin.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("1048576", 2**20),
        ("7B", 7),
        ("500MB", 500_000_000),
        ("4GiB", 4 * 2**30),
        (" 4 gib ", 4 * 2**30),
        ("1.5KiB", 1536),
        ("2TiB", 2 * 2**40),
        ("3tb", 3 * 10**12),
        ("9007199254740993", 2**53 + 1),
        ("0.1GB", 100_000_000),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", " ", "GiB", "4G", "4k", "4i", "4ib", "-1", "+1", "1e9", "1,000", "1_000", "4 GiB x"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size such as 4GiB") as refusal:
        parse_bytes(text)
    assert repr(text) in str(refusal.value)


@given(st.integers(0, 2**60), st.sampled_from(["", "B", "KiB", "mib", "GB", "tb"]))
def test_a_whole_number_of_any_unit_is_exact(count: int, unit: str) -> None:
    factor = {"": 1, "B": 1, "KiB": 2**10, "mib": 2**20, "GB": 10**9, "tb": 10**12}[unit]
    assert parse_bytes(f"{count}{unit}") == count * factor


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1.5 * 2**30, "1.50 GiB"),
        (9.999 * 2**20, "10.0 MiB"),
        (99.96 * 2**20, "100 MiB"),
        (2**20 - 1, "1.00 MiB"),
        (5000 * 2**40, "5000 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_sizes_are_written(count: float, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(1, 2**52))
def test_what_is_written_reads_back_within_a_percent(count: int) -> None:
    text = format_bytes(count)
    assert len(text.split()[0].replace(".", "")) <= 4
    assert parse_bytes(text) == pytest.approx(count, rel=0.006)
