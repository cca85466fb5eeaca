"""What fits a budget: the arithmetic of ``tinykv inspect``."""

from __future__ import annotations

from tinykv_plugin.cli.capacity import (
    GroupSize,
    longest_request,
    request_bytes,
    requests_that_fit,
    stock_request_bytes,
)

FULL = GroupSize(window=None, held=None, page_size=16, page_bytes=1600, page_limit=1000)
WINDOW = GroupSize(window=64, held=80, page_size=16, page_bytes=800, page_limit=2000)


def test_a_full_group_holds_whole_pages() -> None:
    assert FULL.pages(1) == 1
    assert FULL.pages(16) == 1
    assert FULL.pages(17) == 2
    assert request_bytes([FULL], 200) == 13 * 1600


def test_a_window_holds_a_page_more_than_it_needs() -> None:
    assert WINDOW.pages(40) == 3
    assert WINDOW.pages(10_000) == 80 // 16 + 1


def test_stock_grows_by_256_tokens_and_stops_at_a_window() -> None:
    assert FULL.stock_bytes(1) == 256 * 100
    assert FULL.stock_bytes(257) == 512 * 100
    assert WINDOW.stock_bytes(1) == 64 * 50
    assert WINDOW.stock_bytes(10_000) == 64 * 50
    assert stock_request_bytes([FULL, WINDOW], 4096) == 4096 * 100 + 64 * 50


def test_requests_share_the_budget_between_groups() -> None:
    one = request_bytes([FULL, WINDOW], 160)
    assert one == 10 * 1600 + 6 * 800
    assert requests_that_fit([FULL, WINDOW], 10 * one + one // 2, 160) == 10


def test_a_limit_of_pages_counts_too() -> None:
    assert requests_that_fit([FULL], 10**12, 160) == 100
    assert longest_request([FULL], 10**12) == 16_000


def test_the_longest_request_leaves_room_for_the_windows() -> None:
    assert longest_request([FULL], 1600 * 7 + 1) == 7 * 16
    assert longest_request([FULL, WINDOW], 1600 * 7 + 6 * 800) == 7 * 16
    assert longest_request([FULL, WINDOW], 100) == 0


def test_windows_alone_never_end() -> None:
    assert longest_request([WINDOW], 10**6) is None
