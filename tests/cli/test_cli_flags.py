"""--kv- flags come from the settings and leave every other argument alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinykv_plugin.cli.failures import UsageError
from tinykv_plugin.cli.flags import flags_help, kv_flags, take_kv_flags
from tinykv_plugin.config import KVCacheConfig

arguments = st.one_of(
    st.sampled_from(["--prompt", "-p", "--", "-", "", "--max-tokens=4", "--quantized-kv-start", "--kv", "a=b"]),
    st.text(max_size=8),
).filter(lambda text: not text.startswith(("--kv-", "--no-kv-")))
values = st.text(max_size=6).filter(lambda text: not text.startswith("--"))
ours = st.one_of(
    st.tuples(
        st.sampled_from([name for name, flag in kv_flags().items() if flag.constant is None]), values, st.booleans()
    ),
    st.sampled_from([name for name, flag in kv_flags().items() if flag.constant is not None]),
)


@given(st.lists(arguments))
def test_arguments_without_our_flags_pass_unchanged(argv: list[str]) -> None:
    assert take_kv_flags(argv) == ({}, argv)


@given(st.lists(st.tuples(arguments.filter(lambda text: text != "--"), st.one_of(st.none(), ours))), ours)
def test_our_flags_are_taken_from_any_place(pieces: list[tuple[str, object]], last: object) -> None:
    argv: list[str] = []
    expected: dict[str, object] = {}
    for argument, flag in [*pieces, (None, last)]:
        if isinstance(flag, tuple):
            name, value, joined = flag
            argv += [f"{name}={value}"] if joined else [name, value]
            expected[kv_flags()[name].field] = value
        elif isinstance(flag, str):
            argv.append(flag)
            expected[kv_flags()[flag].field] = kv_flags()[flag].constant
        if argument is not None:
            argv.append(argument)
    assert take_kv_flags(argv) == (expected, [argument for argument, _ in pieces])


@given(st.lists(st.text(max_size=8)))
def test_nothing_after_a_double_dash_is_ours(argv: list[str]) -> None:
    tail = ["--", "--kv-stats", *argv]
    assert take_kv_flags(["--kv-stats", *tail]) == ({"stats": True}, tail)


def test_every_setting_has_a_flag() -> None:
    assert {flag.field for flag in kv_flags().values()} == set(KVCacheConfig.model_fields)


def test_the_last_of_several_wins() -> None:
    fields, rest = take_kv_flags(["--kv-page-size", "8", "x", "--kv-page-size=16", "--kv-stats", "--no-kv-stats"])
    assert fields == {"page_size": "16", "stats": False}
    assert rest == ["x"]


def test_text_with_a_space_is_a_value_not_a_flag() -> None:
    argv = ["--prompt", "--kv-stats is a flag", "--prompt", "--kv-foo=is none"]
    assert take_kv_flags(argv) == ({}, argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--kv-page-sise", "8"], "--kv-page-sise is not known; did you mean --kv-page-size?"),
        (["--kv-page_size", "8"], "--kv-page_size is not known; did you mean --kv-page-size?"),
        (["--kv-page", "8"], "--kv-page is not known; did you mean --kv-page-size?"),
        (["--kv-bit=4"], "--kv-bit is not known; did you mean --kv-bits?"),
        (["--no-kv-page-size"], "--no-kv-page-size is not known"),
        (["--kv-zzz"], "--kv-zzz is not known"),
        (["--kv-memory"], "--kv-memory needs a value"),
        (["--kv-memory", "--prompt", "x"], "--kv-memory needs a value"),
        (["--kv-stats=yes"], "--kv-stats takes no value, got 'yes'; its opposite is --no-kv-stats"),
        (["--no-kv-stats=1"], "--no-kv-stats takes no value, got '1'; its opposite is --kv-stats"),
    ],
)
def test_wrong_flags_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=r".") as caught:
        take_kv_flags(argv)
    assert message in str(caught.value)


def test_leading_flags_end_at_the_program() -> None:
    fields, rest = take_kv_flags(["--kv-stats", "script.py", "--kv-page-size", "8", "--kv-none"], leading=True)
    assert fields == {"stats": True}
    assert rest == ["script.py", "--kv-page-size", "8", "--kv-none"]


def test_help_describes_every_flag() -> None:
    text = flags_help()
    assert all(f"{name} VALUE" in text or f"{name}," in text or f", {name}" in text for name in kv_flags())
    assert "Default: 32." in text
    assert "TINYKV_<SETTING>" in text
    assert "None" not in text
