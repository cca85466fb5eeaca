"""PagedSequence: one request's tokens in pages, shared by the caches of all its layers."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from .errors import CacheStateError

if TYPE_CHECKING:
    from .running_batch import RunningBatch
    from .session import PagedSession
    from .step import Step
    from .table import PageTable

BROKEN_OFF = "the last forward pass broke off; its tokens were taken back: call the model again"


class PagedSequence:
    """The page tables of one request, one per cache group, and how far each layer has come.

    The layers of a sequence grow together: ``tokens`` counts those that every layer has. While a forward pass is under
    way (``step``), the layers that have written are ``growing`` tokens ahead; ``trims`` notes layers that were trimmed
    before the others. Either is put right when a new pass begins (:meth:`heal`). ``layers`` is the bit set of layers
    whose caches use this sequence.
    """

    __slots__ = (
        "__weakref__",
        "_forked_at",
        "_forks",
        "batch",
        "broken",
        "growing",
        "layers",
        "lost",
        "rounded_from",
        "session",
        "slots",
        "step",
        "stepwise",
        "tables",
        "tokens",
        "trims",
        "version",
    )

    def __init__(self, session: PagedSession, tables: list[PageTable], layers: int = 0) -> None:
        self.session = session
        self.tables = tables
        self.layers = layers
        self.tokens = 0
        self.growing = 0
        self.step: Step | None = None
        self.trims: dict[int, int] = {}
        self.version = 0
        # Slots of its own pages, in every group, that the next tokens can go to without asking for pages.
        self.slots = 0
        # Passes of several tokens are drafts to be verified: each reads what it would read alone.
        self.stepwise = False
        self.batch: RunningBatch | None = None  # that it was last in
        # A pass broke off: layers without pages may have gone on further than ``tokens``.
        self.broken = False
        # Tokens there were when open pages were filled with rounded ones: from their page on, K/V are not those that
        # the same tokens have elsewhere.
        self.rounded_from: int | None = None
        # Its pages hold nothing any more: see unfinished.py.
        self.lost = False
        self._forks: list[tuple[str, weakref.ref[PagedSequence]]] = []
        self._forked_at = -1
        session.sequences.add(self)

    def __del__(self) -> None:
        # Runs in any thread at any time, so no lock is taken: the next allocation collects the queue.
        self.session.abandoned.append((self.tables, self.tokens))

    def offset(self, bit: int) -> int:
        """Tokens of the layer with ``bit``."""
        tokens = self.tokens
        if self.step is not None and self.step.done & bit:
            tokens += self.growing
        return tokens - self.trims.get(bit, 0) if self.trims else tokens

    @property
    def max_kv_size(self) -> int | None:
        """The size limit this request was made with."""
        limits = [table.retention.window for table in self.tables if table.retention.keep]
        return limits[0] if limits else None

    @property
    def exact_tokens(self) -> int:
        """Tokens, whole pages, whose K/V depend on nothing but the tokens themselves."""
        if self.rounded_from is None:
            return self.tokens
        return self.rounded_from - self.rounded_from % self.tables[0].page_size

    def note_rounded(self, tokens: int) -> None:
        """Open pages were filled with rounded tokens when there were so many."""
        self.rounded_from = tokens if self.rounded_from is None else min(self.rounded_from, tokens)

    def heal(self) -> None:
        """Bring all layers to the same length after a pass or a trim that reached only some of them.

        A pass that broke off is taken back; a partial trim is completed. The shortest layer decides, so nothing that
        some layer lacks is ever read.
        """
        if self.step is not None:
            for row in self.step.live_rows():
                row.broken = True
                row.step = None
                row.growing = 0
                row.truncate(row.tokens)
        if self.trims:
            self.truncate(self.tokens - max(self.trims.values()))

    def truncate(self, tokens: int) -> None:
        """Forget the tokens from ``tokens`` on, in every layer."""
        self.version += 1
        self.slots = 0
        self.trims = {}
        self.tokens = tokens
        self.lost = self.lost and tokens > 0
        if self.rounded_from is not None and tokens <= self.exact_tokens:
            self.rounded_from = None
        for group, table in enumerate(self.tables):
            if -(-tokens // table.page_size) < len(table.pages):
                self.own(group).truncate(tokens)

    def trim(self, bit: int, count: int) -> int:
        """Take ``count`` tokens off one layer; when all layers have been asked, the pages go back.

        Returns the tokens taken, fewer if there are fewer. Raises CacheStateError if a window has passed the place.
        """
        if self.step is not None:
            self.heal()
        trimmed = self.trims.get(bit, 0)
        target = self.trim_target(bit, count)
        count = self.tokens - trimmed - target
        if count:
            self.trims[bit] = trimmed + count
            if len(self.trims) == self.layers.bit_count() and len(set(self.trims.values())) == 1:
                self.truncate(target)
        return count

    def trim_target(self, bit: int, count: int) -> int:
        """Tokens that one layer has after :meth:`trim`. Raises what that would; changes nothing."""
        target = max(0, self.tokens - self.trims.get(bit, 0) - count)
        for table in self.tables:
            # What the last token has seen must be there, not only what the next one will see.
            needed = table.retention.first_needed(max(0, target - 1))
            if not table.retention.page and needed < table.first_position:
                raise CacheStateError(
                    f"can't rewind to {target} tokens: a layer with a window of {table.retention.window} tokens has "
                    f"dropped those before {table.first_position}; raise rewind ({table.retention.rewind}) to keep more"
                )
        return target

    def count_slots(self) -> None:
        """After a reservation: all tail pages are this sequence's own."""
        self.slots = min(len(table.pages) * table.page_size for table in self.tables) - self.tokens

    def own(self, group: int) -> PageTable:
        """The table of ``group``, made this sequence's own if it is shared with a fork."""
        table = self.tables[group]
        owned = table.owned()
        if owned is not table:
            self.session.journal.record(self.tables.__setitem__, group, table)
            self.tables[group] = owned
        return owned

    def fork(self, bit: int, purpose: str = "copy") -> PagedSequence:
        """A sequence with the same tokens that shares every page; O(1).

        mlx-lm copies, merges and extracts caches layer by layer: layers that ask one after the other for the same
        ``purpose``, with nothing changed in between, get the same fork. A request may be merged with itself: then its
        first fork that the layer lacks is taken, so that all layers see the rows in one order.
        """
        self.heal()
        if self._forked_at != self.version:
            self._forked_at = self.version
            self._forks = []
        found = [fork for kind, ref in self._forks if kind == purpose and (fork := ref()) is not None]
        for fork in reversed(found) if purpose == "copy" else found:
            if not fork.version and not fork.layers & bit:
                break
        else:
            fork = PagedSequence(self.session, list(self.tables))
            fork.tokens = self.tokens
            fork.broken = self.broken
            fork.lost = self.lost
            fork.rounded_from = self.rounded_from
            self.slots = 0  # the tail page is shared from now on
            for table in self.tables:
                table.holders += 1
            self._forks.append((purpose, weakref.ref(fork)))
        fork.layers |= bit
        return fork
