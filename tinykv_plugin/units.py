"""Byte sizes as people write and read them."""

from __future__ import annotations

import re
from decimal import Decimal

_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _UNITS[f"{_prefix}ib"] = 1024**_power
    _UNITS[f"{_prefix}b"] = 1000**_power

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """``"4GiB"``, ``"500MB"`` or ``"1048576"`` in bytes. Raises ValueError for anything else."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a size such as 4GiB, 500MB or 1048576")
    return int(Decimal(match[1]) * _UNITS[match[2].lower()])


def format_bytes(count: float) -> str:
    """``count`` bytes with a binary unit and three significant digits, e.g. ``"1.50 GiB"``."""
    units = iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while abs(count) >= 1023.5 and unit != "TiB":
        count /= 1024
        unit = next(units)
    size = abs(count)
    digits = 0 if unit == "B" or size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{count:.{digits}f} {unit}"
