"""What attention gets instead of K/V tensors: PagedKVMetadata, the PagedKV handle and PagedMask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import mlx.core as mx
import numpy as np

from .errors import HandleTouchedError

if TYPE_CHECKING:
    from .pages import LayerPages
    from .step import GroupStep


class PagedKVMetadata:
    """One layer's pages and where the rows of a step are in them; valid for that step only.

    The arrays are made at first use and shared by all layers of a cache group. Query token ``i`` of row ``b`` is at
    position ``context_lens[b] - query_lens[b] + i``; queries from ``query_lens[b]`` on are padding.
    """

    __slots__ = ("open_pages", "pages", "step")

    def __init__(self, pages: LayerPages, step: GroupStep, open_pages: LayerPages | None = None) -> None:
        self.pages = pages
        self.step = step
        self.open_pages = open_pages

    def of(self, step: GroupStep) -> PagedKVMetadata:
        """The same pages for a part of the step."""
        return PagedKVMetadata(self.pages, step, self.open_pages)

    @property
    def open(self) -> PagedKVMetadata | None:
        """The same for the pages that a query's own page is read from, position by position; None: there are none.

        A query reads the tokens of the page that it is in itself from there, and those of all other pages from here. A
        query before position ``step.full_until()`` of its row (there) reads all tokens from there.
        """
        pages, step = self.open_pages, self.step.open
        return None if pages is None or step is None else PagedKVMetadata(pages, step)

    @property
    def key_pages(self) -> mx.array:
        """``(num_pages, kv_heads, page_size, elements)``, as stored. Don't hold it over a write."""
        assert self.pages.keys is not None
        return self.pages.keys

    @property
    def value_pages(self) -> mx.array:
        """``(num_pages, kv_heads, page_size, elements)``, as stored. Don't hold it over a write."""
        assert self.pages.values is not None
        return self.pages.values

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.pages.page_size

    @property
    def batch(self) -> int:
        """Rows of the step."""
        return len(self.step.context_lens)

    @property
    def window(self) -> int | None:
        """Tokens a query may look back on, itself included; None: all. Pages behind it are -1 in the table."""
        return self.step.window

    @property
    def keep(self) -> int:
        """First tokens that the window doesn't drop (``max_kv_size``); 0 for none."""
        return self.step.keep

    @property
    def block_table(self) -> mx.array:
        """int32 ``(batch, max_pages)``: logical page to page_id, -1 where a row has none."""
        return self.step.block_table()

    @property
    def page_ids(self) -> mx.array:
        """int32 ``(n,)``: the block table's rows one after the other, unpadded.

        Page ``i`` of row ``b`` is ``page_ids[row_starts[b] + i]``. Only pages of the row's tokens may be read, and none
        behind its window: what stands elsewhere means nothing. In contrast to the rectangle, a step costs what it adds.
        """
        return self.step.page_ids()

    @property
    def row_starts(self) -> mx.array:
        """int32 ``(batch,)``: where in :attr:`page_ids` each row begins."""
        return self.step.row_starts()

    @property
    def context_lens(self) -> mx.array:
        """int32 ``(batch,)``: valid tokens per row, this step's included."""
        return self.step.context_lens_array()

    @property
    def query_lens(self) -> mx.array:
        """int32 ``(batch,)``: this step's valid tokens per row."""
        return self.step.query_lens_array()

    @property
    def slot_mapping(self) -> mx.array:
        """int32 ``(batch, tokens)``: ``page_id * page_size + offset_in_page`` of each written token, -1 = skipped."""
        return self.step.slot_mapping()


class _Untouchable:
    """Raises HandleTouchedError on any use a tensor would allow."""

    __slots__ = ()
    _what = "it"

    def _layer(self) -> int:
        return -1

    def _touched(self, how: str) -> NoReturn:
        raise HandleTouchedError(self._layer(), f"{self._what}{how}")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") and name.endswith("__"):
            # Protocol probes (copy, pickle, numpy, abc) must see a plain AttributeError.
            raise AttributeError(name)
        self._touched(f".{name}")

    def __getitem__(self, key: object) -> NoReturn:
        self._touched("[...]")

    def __iter__(self) -> NoReturn:
        self._touched(" in an unpacking")

    def __len__(self) -> NoReturn:
        self._touched(" in len()")

    def __bool__(self) -> NoReturn:
        self._touched(" as a truth value")

    def _operate(self, *args: object) -> NoReturn:
        self._touched(" in arithmetic")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _operate
    __matmul__ = __rmatmul__ = __neg__ = __and__ = __rand__ = __or__ = __ror__ = __invert__ = _operate
    __lt__ = __le__ = __gt__ = __ge__ = _operate


class PagedKV(_Untouchable):
    """What ``update_and_fetch`` returns in place of a K or V tensor: only attention may use it.

    A model may ask for its dtype, and for another one: that of the queries, in which attention computes anyway.
    """

    __slots__ = ("cast", "layer", "metadata", "side")

    def __init__(self, layer: Any, metadata: PagedKVMetadata, side: str, cast: mx.Dtype | None = None) -> None:
        self.layer = layer
        self.metadata = metadata
        self.side = side
        self.cast = cast  # what astype() asked for

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of what was written, or what :meth:`astype` asked for."""
        spec = self.layer.spec
        own: mx.Dtype = spec.dtype if self.side == "keys" else spec.value_dtype
        return self.cast or own

    def astype(self, dtype: mx.Dtype) -> PagedKV:
        """A handle to the same pages, to be attended to by queries of ``dtype``."""
        return PagedKV(self.layer, self.metadata, self.side, dtype)

    def _layer(self) -> int:
        return int(self.layer.index)

    @property
    def _what(self) -> str:  # type: ignore[override]
        return self.side

    def __repr__(self) -> str:
        return f"<PagedKV {self.side} of layer {self.layer.index}>"


class PagedMask(_Untouchable):
    """A causal mask limited to the last ``window`` tokens; what ``make_mask`` returns in place of an array.

    With ``chunk``, a query sees only the tokens from the start of its own chunk of that many positions on.
    """

    __slots__ = ("chunk", "window")
    _what = "mask"

    def __init__(self, window: int, chunk: int | None = None) -> None:
        self.window = window
        self.chunk = chunk

    def __repr__(self) -> str:
        return f"<PagedMask window={self.window}{f', chunk={self.chunk}' if self.chunk else ''}>"


def int32(values: Any) -> mx.array:
    """``values`` (nested lists or a numpy array) as an evaluated int32 array: safe to use from any thread."""
    return mx.array(np.ascontiguousarray(values, dtype=np.int32))
