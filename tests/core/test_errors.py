import copy
import pickle

import pytest

from tinykv_plugin import errors
from tinykv_plugin.errors import (
    BlasError,
    CacheStateError,
    ConfigError,
    DraftError,
    HandleTouchedError,
    InvariantError,
    OutOfPagesError,
    PluginError,
    PoolGrowthError,
    PromptCacheFileError,
    QueueFullError,
    RequestTooLargeError,
    TinyKVError,
)

EXAMPLES = [
    ConfigError("page_size", "0 is not allowed"),
    PluginError("no such plugin"),
    CacheStateError("detached"),
    PromptCacheFileError("chat.safetensors", "it is of another model"),
    HandleTouchedError(3, "keys.shape"),
    InvariantError("a page in two states"),
    OutOfPagesError(needed=5, free=2, total=10, page_bytes=4096, page_size=16, setting="memory"),
    RequestTooLargeError(tokens=900, pages=8, need=8192, budget=4096, setting="memory"),
    QueueFullError(waiting=64, max_queue=64, retry_after=3),
    PoolGrowthError(pages=8, more=16, bytes_wanted=2**20, cause="std::bad_alloc"),
    BlasError("no such file"),
    DraftError("its cache can't take tokens back"),
    errors.DemoModelError("no network"),
]


def test_there_is_an_example_of_every_error() -> None:
    defined = {item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, TinyKVError)} - {
        TinyKVError
    }
    assert {type(error) for error in EXAMPLES} == defined


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_every_error_is_one_line_and_crosses_processes(error: TinyKVError) -> None:
    assert str(error)
    assert "\n" not in str(error)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (ConfigError, ValueError),
        (HandleTouchedError, TypeError),
        (InvariantError, AssertionError),
        (OutOfPagesError, MemoryError),
        (PoolGrowthError, MemoryError),
        (PromptCacheFileError, ValueError),
        (RequestTooLargeError, ValueError),
    ],
)
def test_each_is_also_the_builtin_that_callers_expect(kind: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(kind, builtin)


def test_out_of_pages_says_which_setting_to_raise_and_how_far() -> None:
    by_memory = OutOfPagesError(5, free=2, total=10, page_bytes=4096, page_size=16, setting="memory")
    assert (by_memory.needed, by_memory.free, by_memory.total, by_memory.page_bytes) == (5, 2, 10, 4096)
    assert "5 needed, 2 free of 10 (4.00 KiB each, 16 tokens)" in str(by_memory)
    assert f"--kv-memory {13 * 4096} (52.0 KiB)" in str(by_memory)
    by_pages = OutOfPagesError(5, free=2, total=10, page_bytes=4096, page_size=16, setting="max_pages")
    assert "--kv-max-pages 13" in str(by_pages)


def test_a_request_too_large_says_what_would_fit() -> None:
    by_memory = RequestTooLargeError(900, 8, 8192, 4096, "memory")
    assert (by_memory.tokens, by_memory.pages, by_memory.need, by_memory.budget) == (900, 8, 8192, 4096)
    assert "needs 8 pages (8.00 KiB) of 4.00 KiB (memory): --kv-memory 8192 would fit" in str(by_memory)
    by_pages = RequestTooLargeError(900, 8, 8192, 4096, "max_pages", limit=5)
    assert "of 5 pages (max_pages): --kv-max-pages 8 would fit" in str(by_pages)


def test_a_growth_that_failed_carries_its_numbers() -> None:
    error = PoolGrowthError(8, 16, 2**20, "std::bad_alloc")
    assert (error.pages, error.more, error.bytes_wanted) == (8, 16, 2**20)
    assert "from 8 to 16 pages (1.00 MiB more): std::bad_alloc" in str(error)
