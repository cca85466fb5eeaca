from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tinykv_plugin.config import KVCacheConfig, allowed
from tinykv_plugin.errors import ConfigError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, without a tinykv.toml yet."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(**fields: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        KVCacheConfig(**fields)
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__
    return caught.value


def test_defaults_are_allowed() -> None:
    defaults = KVCacheConfig()
    assert KVCacheConfig(**defaults.model_dump()) == defaults


@pytest.mark.parametrize("name", KVCacheConfig.model_fields)
def test_every_setting_is_described(name: str) -> None:
    description = KVCacheConfig.model_fields[name].description
    assert description
    assert description.endswith(".")
    assert allowed(name)


def test_keyword_beats_environment_beats_file_beats_default(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert KVCacheConfig().page_size == 32
    (folder / "tinykv.toml").write_text("page_size = 64\nrewind = 1\n")
    assert KVCacheConfig().page_size == 64
    monkeypatch.setenv("TINYKV_PAGE_SIZE", "128")
    assert KVCacheConfig().page_size == 128
    assert KVCacheConfig(page_size=8) == KVCacheConfig(page_size="8")
    assert KVCacheConfig(page_size=8).page_size == 8
    assert KVCacheConfig(page_size=8).rewind == 1


def test_a_wrong_value_in_a_weaker_source_is_not_looked_at(folder: Path) -> None:
    (folder / "tinykv.toml").write_text("page_size = 'many'\n")
    assert KVCacheConfig(page_size=8).page_size == 8
    assert refusal().field == "page_size"


@pytest.mark.parametrize(
    ("value", "memory"),
    [
        (0.25, 0.25),
        ("0.5", 0.5),
        (".5", 0.5),
        (" 0.5 ", 0.5),
        (1, 1),
        (4096, 4096),
        ("4096", 4096),
        (4e9, 4_000_000_000),
        ("4GiB", 4 * 2**30),
        ("0.5GiB", 2**29),
        ("500MB", 500_000_000),
        (np.float64(0.5), 0.5),
    ],
)
def test_memory_is_a_size_or_a_fraction(value: object, memory: float) -> None:
    config = KVCacheConfig(memory=value)
    assert config.memory == memory
    assert type(config.memory) in (int, float)
    assert config.memory_bytes(1000) == (memory if memory >= 1 else int(memory * 1000))


@pytest.mark.parametrize(
    "value",
    [
        *(True, False, None, [1], {}),
        *(1.0, 2.5, 0, 0.0, -1, -0.5, float("nan"), float("inf")),
        *("", " ", "lots", "1.0", "-1", "0", "1e9", "4 G", "nan", "inf", "½"),
    ],
)
def test_memory_is_nothing_else(value: object) -> None:
    error = refusal(memory=value)
    assert error.field == "memory"
    assert str(error) == f"memory: {value!r} is not allowed: it must be {allowed('memory')}"


@given(st.floats() | st.integers() | st.text() | st.booleans() | st.none())
def test_any_memory_is_a_budget_or_one_clear_line(value: Any) -> None:
    try:
        budget: int | str = KVCacheConfig(memory=value).memory_bytes(2**40)
    except ConfigError as error:
        budget = str(error)
    if isinstance(budget, str):
        assert budget.startswith("memory: ")
        assert "\n" not in budget
    else:
        assert type(budget) is int
        assert budget >= 0


@pytest.mark.parametrize(
    ("field", "least", "most"),
    [("page_size", 1, 1024), ("max_pages", 1, None), ("max_kv_size", 8, None), ("rewind", 0, 4096)],
)
def test_counts_are_whole_numbers_within_bounds(field: str, least: int, most: int | None) -> None:
    bounds = f"from {least} to {most}" if most is not None else f"of at least {least}"
    assert allowed(field) == f"a whole number {bounds}"
    for value in (least, str(least), f" {least} ", 1000):
        assert getattr(KVCacheConfig(**{field: value}), field) == int(value)
    wrong = [least - 1, "3.5", 3.5, 32.0, True, "", "many", "²", float("nan"), "0x10", [8], np.zeros((3, 3))]
    for value in [*wrong, *([] if most is None else [most + 1])]:
        error = refusal(**{field: value})
        assert error.field == field
        assert str(error).endswith(f"it must be {allowed(field)}")


@pytest.mark.parametrize("field", ["max_pages", "max_kv_size"])
def test_a_limit_may_be_unset(field: str) -> None:
    assert getattr(KVCacheConfig(**{field: None}), field) is None


@pytest.mark.parametrize("field", ["cache", "attention"])
def test_names_are_text(field: str) -> None:
    assert getattr(KVCacheConfig(**{field: " mine "}), field) == "mine"
    for value in ("", " ", 3, None):
        assert str(refusal(**{field: value})) == f"{field}: {value!r} is not allowed: it must be a name"


def test_a_choice_names_what_there_is_to_choose_from() -> None:
    assert KVCacheConfig(on_full="wait").on_full == "wait"
    assert str(refusal(on_full="panic")) == ("on_full: 'panic' is not allowed: it must be one of preempt, wait, error")


def test_switches_are_true_or_false(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KVCacheConfig(stats=True).stats
    for text, value in (("1", True), ("true", True), ("off", False), ("No", False)):
        monkeypatch.setenv("TINYKV_VERBOSE", text)
        assert KVCacheConfig().verbose is value
    assert str(refusal(stats="maybe")) == "stats: 'maybe' is not allowed: it must be true or false"


def test_the_environment_is_named_in_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYKV_PAGE_SIZE", "3.5")
    expected = "page_size: '3.5' is not allowed (from the environment variable TINYKV_PAGE_SIZE): it must be"
    assert str(refusal()).startswith(expected)


def test_the_environment_takes_every_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MEMORY", "0.25"), ("MAX_PAGES", "7"), ("ATTENTION", "gather"), ("STATS", "yes")):
        monkeypatch.setenv(f"TINYKV_{name}", value)
    monkeypatch.setenv("tinykv_cache", "dense")
    config = KVCacheConfig()
    assert (config.memory, config.max_pages, config.attention, config.stats) == (0.25, 7, "gather", True)
    assert config.cache == "dense"


@pytest.mark.parametrize("name", [f"TINYKV_{name.upper()}" for name in KVCacheConfig.model_fields])
def test_an_empty_variable_is_an_unset_one(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "")
    assert KVCacheConfig() == KVCacheConfig.model_construct()
    (folder / "tinykv.toml").write_text("page_size = 0")
    assert "(from tinykv.toml)" in str(refusal())


@pytest.mark.parametrize("name", ["BLAS", "DISABLE_PLUGINS", "CACHE_DIR", "", "NO_SUCH_SETTING"])
def test_other_variables_are_not_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"TINYKV_{name}", "{[broken")
    assert KVCacheConfig() == KVCacheConfig.model_construct()


def test_an_unknown_keyword_is_answered_with_the_known_ones() -> None:
    error = refusal(unknown=1)
    assert error.field == "unknown"
    assert str(error) == f"unknown: no such setting; there are: {', '.join(KVCacheConfig.model_fields)}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("unknown = 1", "unknown: no such setting (from tinykv.toml); there are: cache, "),
        ("[tinykv]\npage_size = 8", "tinykv: no such setting (from tinykv.toml)"),
        ("page_size = 3.5", "page_size: 3.5 is not allowed (from tinykv.toml): it must be a whole number"),
        ("memory = true", "memory: True is not allowed (from tinykv.toml): it must be a size"),
        ("page_size = = 8", "tinykv.toml: the file can't be read: Invalid value (at line 1, column 13)"),
        (b"\xff\xfe", "tinykv.toml: the file can't be read: 'utf-8' codec can't decode"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(content: str | bytes, message: str, folder: Path) -> None:
    (folder / "tinykv.toml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert str(refusal()).startswith(message)


def test_an_unreadable_file_is_one_line_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(settings: object) -> None:
        raise PermissionError(13, "Permission denied", "tinykv.toml")

    monkeypatch.setattr("tinykv_plugin.config.TomlConfigSettingsSource", deny)
    assert str(refusal()).startswith("tinykv.toml: the file can't be read: [Errno 13] Permission denied")


def test_it_is_immutable() -> None:
    config = KVCacheConfig()
    with pytest.raises(ValidationError, match="frozen"):
        config.page_size = 8  # type: ignore[misc]
    assert {config: 1}[KVCacheConfig()] == 1
