"""The ``--kv-…`` flags: generated from KVCacheConfig, and taken out of a command line that is otherwise left alone."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import CONFIG_FILE, ENV_PREFIX, KVCacheConfig
from .failures import UsageError, did_you_mean

PREFIX = "--kv-"
NEGATED_PREFIX = "--no-kv-"
MLX_LM_FIELDS = ("bits", "group_size")
"""Settings whose flags mlx-lm has too: with its own caches they are given back to it."""


@dataclass(frozen=True)
class KVFlag:
    """One flag. ``constant`` is the value of a switch; None for a flag that is followed by its value."""

    name: str
    field: str
    constant: bool | None


def kv_flags() -> dict[str, KVFlag]:
    """Every flag by its name, in the order of the settings."""
    flags = []
    for field, info in KVCacheConfig.model_fields.items():
        dashed = field.replace("_", "-")
        if info.annotation is bool:
            flags += [KVFlag(PREFIX + dashed, field, True), KVFlag(NEGATED_PREFIX + dashed, field, False)]
        else:
            flags.append(KVFlag(PREFIX + dashed, field, None))
    return {flag.name: flag for flag in flags}


def take_kv_flags(argv: Sequence[str], *, leading: bool = False) -> tuple[dict[str, str | bool], list[str]]:
    """Split ``argv`` into settings, as written, and every other argument, in order.

    Both ``--kv-x VALUE`` and ``--kv-x=VALUE`` are taken; the last of several wins; nothing after ``--`` is looked at.
    ``leading``: also stop at the first argument that is none of our flags.

    Raises UsageError for an unknown flag (no abbreviations) and for a missing or superfluous value.
    """
    known = kv_flags()
    fields: dict[str, str | bool] = {}
    rest: list[str] = []
    remaining = list(argv)
    while remaining:
        argument = remaining.pop(0)
        name, equals, value = argument.partition("=")
        flag = known.get(name)
        if flag is None:
            if argument == "--" or (leading and not _looks_like_ours(argument)):
                return fields, [*rest, argument, *remaining]
            if _looks_like_ours(argument):
                raise UsageError(f"{name} is not known{did_you_mean(name, [*known])}")
            rest.append(argument)
        elif flag.constant is not None:
            if equals:
                raise UsageError(f"{name} takes no value, got {value!r}; its opposite is {_opposite(flag)}")
            fields[flag.field] = flag.constant
        elif equals:
            fields[flag.field] = value
        elif remaining and not remaining[0].startswith("--"):
            fields[flag.field] = remaining.pop(0)
        else:
            raise UsageError(f"{name} needs a value")
    return fields, rest


def _looks_like_ours(argument: str) -> bool:
    """Whether argparse would see an option here that belongs to nobody but us; text with a space is a value to it."""
    return argument.startswith((PREFIX, NEGATED_PREFIX)) and " " not in argument


def _opposite(flag: KVFlag) -> str:
    return (NEGATED_PREFIX if flag.constant else PREFIX) + flag.field.replace("_", "-")


def flags_help() -> str:
    """The section of ``--help`` that describes the flags, laid out like argparse's own."""
    parser = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS, allow_abbrev=False)
    group = parser.add_argument_group(
        "paged KV cache",
        f"Also read from the environment ({ENV_PREFIX}<SETTING>) and from {CONFIG_FILE}; a flag beats both.",
    )
    for field, info in KVCacheConfig.model_fields.items():
        text = str(info.description).replace("%", "%%")
        dashed = field.replace("_", "-")
        if info.annotation is bool:
            state = "on" if info.default else "off"
            names = (PREFIX + dashed, NEGATED_PREFIX + dashed)
            group.add_argument(*names, action="store_true", help=f"{text} Default: {state}.")
        else:
            # "Unset: ..." in the description says what None means.
            default = "" if info.default is None else f" Default: {info.default}."
            group.add_argument(PREFIX + dashed, metavar="VALUE", help=text + default)
    return parser.format_help()
