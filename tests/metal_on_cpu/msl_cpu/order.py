"""Order: whether the dispatches that touch a pool are ordered, as far as mlx can know.

mlx lets kernels overlap unless one takes an output of the other as an input. A pool that is written in place is an
input to its writer, so mlx sees no dependency there: whoever touches a pool must take the token of whoever wrote it
before, and whoever writes it those of whoever read it, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TOKEN_BYTES = 64


class OrderError(AssertionError):
    """Two dispatches touch a pool, one of them writes, and nothing orders them."""


@dataclass(frozen=True)
class Dispatch:
    """One run of a kernel; ``before`` has the bit of each dispatch that is over when this one begins."""

    number: int
    kernel: str
    before: int


class Order:
    """What was dispatched so far. Arrays are known by their address, and kept so that no address is used again."""

    def __init__(self) -> None:
        self._count = 0
        self._made_by: dict[int, Dispatch] = {}
        self._touched: dict[int, list[tuple[Dispatch, bool]]] = {}
        self._kept: list[Any] = []

    def begin(self, kernel: str, inputs: Mapping[str, int], written: Sequence[str]) -> Dispatch:
        """A dispatch with the addresses of its ``inputs``, some of them ``written`` in place.

        Raises OrderError if it isn't ordered after those that touched what it touches.
        """
        before = 0
        for address in inputs.values():
            maker = self._made_by.get(address)
            if maker is not None:
                before |= maker.before | 1 << maker.number
        dispatch = Dispatch(self._count, kernel, before)
        self._count += 1
        for name, address in inputs.items():
            writes = name in written
            for earlier, wrote in self._touched.get(address, []):
                if (writes or wrote) and not before >> earlier.number & 1:
                    raise OrderError(
                        f"RACE between dispatches: {kernel} {'writes' if writes else 'reads'} '{name}', which "
                        f"{earlier.kernel} {'wrote' if wrote else 'read'} before, and takes no token that orders them"
                    )
        for name, address in inputs.items():
            touched = self._touched.get(address, [])
            if name in written:
                # Whatever comes after this write comes after all that it waited for.
                self._touched[address] = [(dispatch, True)]
            elif touched:
                touched.append((dispatch, False))
        return dispatch

    def end(self, dispatch: Dispatch, outputs: Sequence[tuple[int, int, Any]]) -> None:
        """Note the ``outputs``, (address, bytes, array), that later dispatches may take as tokens."""
        for address, size, array in outputs:
            if size <= _TOKEN_BYTES:
                self._made_by[address] = dispatch
                self._kept.append(array)

    def keep(self, array: Any) -> None:
        """Keep a pool."""
        self._kept.append(array)
