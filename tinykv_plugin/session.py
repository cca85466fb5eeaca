"""PagedSession: the paged caches of one attached model: layers, pools, requests, and the step they share."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from . import __version__
from .audit import audit
from .cache import PagedKVCache
from .distributed import agree_on_room
from .errors import CacheStateError
from .group_info import GroupInfo
from .hookspecs import RequestFreed
from .journal import Journal
from .kv_format import KVFormat
from .layer import PagedLayer
from .laying_out import lay_out, pages_for
from .layout import leaves, replace_leaves
from .metadata import PagedKVMetadata, int32
from .open_page import open_step, pages_to_read
from .plan import CachePlan
from .pool import Budget, PagePool
from .prefix_cache import PrefixCache
from .prefix_disk import PrefixDisk
from .prefix_store import PrefixStore
from .protocols import AttachContext, AttentionBackend, LayerPlan
from .reservation import reserve
from .retention import Retention, retentions
from .runner import Runner
from .running_batch import RunningBatches
from .separate_rows import guard
from .sequence import PagedSequence
from .stats import PoolStats, collect
from .step import GroupStep, Step
from .table import PageTable
from .unfinished import LOST
from .unused import UnusedCache

log = logging.getLogger("tinykv")


class PagedSession:
    """What the paged provider opens. Bookkeeping is guarded by ``lock``; caches call in with it held."""

    def __init__(self, context: AttachContext, plan: CachePlan, budget: Budget) -> None:
        self.lock = budget.lock
        self.journal = Journal()
        self.budget = budget
        budget.sessions[self] = None
        self.layers = plan.layers
        self.sequences: weakref.WeakSet[PagedSequence] = weakref.WeakSet()
        # Tables of requests that are gone, put here by their finalizer; see collect_abandoned().
        self.abandoned: deque[tuple[list[PageTable], int]] = deque()
        # Of requests that are gone: slots their pages had when they ended, and those that held a token.
        self.freed_slots = 0
        self.freed_filled = 0
        self.cow_copies = 0
        self.closed = False
        self._agreed = False
        self.writer: AttentionBackend = plan.writer
        self.gather = context.gather
        self._context = context
        self._plan = plan
        self.kv_format = KVFormat.of(context.config)
        self.emit = context.emit
        self.runner = Runner()
        self.batches = RunningBatches(len(plan.groups))
        self._offsets: tuple[list[int], mx.array] | None = None
        config = context.config
        self.pools = [
            PagePool(
                name,
                config.page_size,
                plan.writer,
                self.journal,
                self.budget,
                config.max_pages,
                context.emit,
                self.kv_format,
            )
            for name in plan.groups
        ]
        for layer in self.layers:
            if layer.spec is not None:
                lay_out(self, layer, layer.spec)
        disk = None
        if config.prefix_dir is not None and config.prefix_cache:
            disk = PrefixDisk(self, PrefixStore(config.prefix_dir, config.prefix_disk_bytes))
        self.prefix = PrefixCache(
            self, context.model, config.prefix_cache, int(config.prefix_states * budget.total), disk
        )

    def agree(self) -> None:
        """Have all processes that a model is divided between decide alike; all must call it at the same point."""
        if not self._agreed:
            self._agreed = True
            agree_on_room(self, self._context.model)

    @property
    def plan(self) -> Sequence[LayerPlan]:
        """One line per entry of the model's cache list."""
        return self._plan.lines

    @property
    def max_pages(self) -> int | None:
        """Most pages in a cache group."""
        return min((pool.max_pages for pool in self.pools if pool.max_pages is not None), default=None)

    @property
    def page_size(self) -> int:
        """The setting: tokens in a page."""
        return self._context.config.page_size

    @property
    def prefix_interval(self) -> int:
        """The setting: tokens between places where a stored prompt can be continued."""
        return self._context.config.prefix_interval

    @property
    def page_format(self) -> str:
        """What pages of other sessions must have in common with this one's to hold the same bytes."""
        groups = [(layer.index, layer.group, layer.opens) for layer in self.layers]
        return f"{__version__} {self.page_size} {self.kv_format} {groups}"

    @property
    def stateful(self) -> Sequence[int]:
        """The leaves whose caches have no pages but hold something."""
        return self._plan.stateful

    @property
    def separate(self) -> str:
        """Why the requests of a batch are run one after the other; "": they are run together."""
        return self._plan.separate

    @property
    def max_kv_size(self) -> int | None:
        """The setting: most tokens a request attends to."""
        return self._context.config.max_kv_size

    @property
    def rewind(self) -> int:
        """The setting: tokens kept behind a window."""
        return self._context.config.rewind

    @property
    def groups(self) -> Sequence[GroupInfo]:
        """The cache groups: which layers share page ids, what a page of theirs takes, how many the budget allows."""
        return [GroupInfo.of(*each) for each in zip(self.pools, self._plan.groups.values(), strict=True)]

    def make_cache(self, max_kv_size: int | None = None) -> list[Any]:
        """Empty caches of one new request, in the shape of the model's own list; no pages are taken yet."""
        return self.caches(self.new_sequence(max_kv_size), {})

    def caches(self, row: PagedSequence, others: Mapping[int, Any]) -> list[Any]:
        """The caches of ``row`` in the shape of the model's own list; ``others`` are those of layers without pages."""
        ours: dict[int, Any] = {layer.index: self.single(layer, row) for layer in self.layers}
        ours |= {index: UnusedCache() for index in self._plan.unused}
        made = replace_leaves(self._context.own_cache(), {**ours, **others})
        self.guard(made)
        return made

    def guard(self, caches: Sequence[Any]) -> None:
        """Have the caches without pages in a request's list refuse what they would do wrong; modifies them."""
        own = leaves(caches)
        for index in self.stateful:
            guard(own[index], bool(self.separate))

    def retentions(self, max_kv_size: int | None) -> list[Retention]:
        """What a request keeps in each group. Raises ConfigError for a size limit that is too small."""
        return retentions(self._plan.groups, max_kv_size, self.rewind, self.page_size, self.kv_format.start)

    def new_sequence(self, max_kv_size: int | None) -> PagedSequence:
        """An empty sequence for all layers."""
        tables = [
            PageTable(pool.allocator, self.journal, pool.page_size, retention)
            for pool, retention in zip(self.pools, self.retentions(max_kv_size), strict=True)
        ]
        with self.lock:
            return PagedSequence(self, tables, sum(layer.bit for layer in self.layers))

    def single(self, layer: PagedLayer, row: PagedSequence) -> PagedKVCache:
        """A layer's cache of one request."""
        return PagedKVCache(self, layer, row)

    def check_room(self, rows: Sequence[PagedSequence], query_lens: Sequence[int]) -> None:
        """Raise OutOfPagesError or PoolGrowthError where :meth:`begin` would; :func:`reserve` says what may change."""
        with self.lock:
            self.enter()
            short = self._short_of_slots(rows, query_lens)
            if short:
                needed = [query_lens[index] for index in short]
                needy = [rows[index] for index in short]
                self._reserve(needy, needed, commit=False)

    def begin(self, rows: Sequence[PagedSequence], query_lens: Sequence[int], width: int) -> Step:
        """Start a forward pass: reserve the pages of all rows in all groups, or none.

        Row ``i`` gets ``query_lens[i]`` more tokens. Raises OutOfPagesError or PoolGrowthError with nothing changed.
        """
        self.agree()
        self.enter()
        short = self._short_of_slots(rows, query_lens)
        if short:
            needy = [rows[index] for index in short]
            needed = [query_lens[index] for index in short]
            if any(row.lost for row in needy):
                raise CacheStateError(LOST)
            try:
                self.cow_copies += self._reserve(needy, needed)
            except Exception:
                for row in rows:
                    row.broken = True  # layers before the first paged one have gone on
                raise
            for row in needy:
                row.count_slots()
        context_lens = [row.tokens + count for row, count in zip(rows, query_lens, strict=True)]
        refs = [weakref.ref(row) for row in rows]
        batch = self.batches.of(rows, refs)
        # Rows that were in another batch since may have changed there.
        changed = [*short, *(index for index, row in enumerate(rows) if row.batch is not batch)]
        groups = []
        for group, block_table in enumerate(batch.block_tables):
            tables = [row.tables[group] for row in rows]
            block_table.update(tables, changed)
            groups.append(GroupStep(tables, context_lens, query_lens, width, block_table))
            groups[-1].stepwise = rows[0].stepwise
        if self._plan.opens:
            opened = open_step(groups[-1])
            for each in groups[:-1]:
                each.open = opened
        step = Step(refs, width, rows[0].layers, groups)
        for row, count in zip(rows, query_lens, strict=True):
            row.step = step
            row.batch = batch
            row.growing = count
            row.slots -= count
            row.version += 1
        return step

    def write(self, layer: PagedLayer, step: Step, keys: mx.array, values: mx.array) -> PagedKVMetadata:
        """Put a layer's new tokens into the pages of ``step``. A step nobody wrote in is taken back on failure."""
        try:
            if threading.get_ident() != self.runner.ident:
                self.enter()  # another thread was here since the step began
            pages = pages_for(self, layer, keys, values)
            metadata = PagedKVMetadata(pages, step.groups[layer.group])
            if pages.packed:
                if pages.open is not None:
                    opened = PagedKVMetadata(pages.open, step.groups[-1])
                    self.writer.write(opened, keys, values)
                    metadata.open_pages = pages_to_read(self.gather, opened, metadata.step.open, keys, values)
                keys, values = pages.spec.encode(keys, values)
            self.writer.write(metadata, pages.before_write(keys), values)
        except BaseException:
            if not step.done:
                for row in step.live_rows():
                    row.heal()
            raise
        step.finish_layer(layer.bit)
        return metadata

    def offsets(self, tokens: list[int]) -> mx.array:
        """``tokens`` as int32; layers that ask for the same numbers get the same array."""
        if self._offsets is None or self._offsets[0] != tokens:
            self._offsets = (tokens, int32(tokens))
        return self._offsets[1]

    def collect_abandoned(self) -> None:
        """Free the pages of requests whose caches are gone."""
        while self.abandoned:
            tables, tokens = self.abandoned.popleft()
            if tokens:
                self.freed_slots += sum(len(table.live_pages()) * table.page_size for table in tables)
                self.freed_filled += sum(table.filled_slots(tokens) for table in tables)
            freed = sum(table.release() for table in tables)
            if freed:
                self.emit("tinykv_request_freed", RequestFreed(tokens, freed))
            if threading.get_ident() == self.runner.ident:
                self.prefix.eviction.keep_within()  # what gives way may have to be read

    def _reserve(self, rows: Sequence[PagedSequence], query_lens: Sequence[int], commit: bool = True) -> int:
        """As :func:`reserve`; stored prompts give way."""
        return self.prefix.eviction.with_room_for(
            rows, lambda: reserve(self.pools, self.journal, rows, query_lens, commit)
        )

    def live_sequences(self) -> list[PagedSequence]:
        """The requests there are; ``lock`` is held, but other threads may be dropping requests meanwhile."""
        while True:
            try:
                return list(self.sequences)
            except RuntimeError:  # the set changed size
                continue

    def collect(self) -> None:
        """Free what was dropped."""
        with self.lock:
            self.collect_abandoned()

    def stats(self) -> PoolStats:
        """Pages and bytes right now; may be asked from any thread."""
        with self.lock:
            self._settle()
            return collect(self)

    def check(self) -> None:
        """Raise InvariantError at the first broken invariant."""
        with self.lock:
            self._settle()
            audit(self)

    def close(self) -> None:
        """Refuse further use of the caches."""
        if self.closed:
            return
        try:
            with self.lock:
                self.enter()
            self.prefix.close()
        except CacheStateError as error:
            log.warning("stored prompts were not written to disk: %s", error)
            self.prefix.clear()
        self.closed = True

    def _settle(self) -> None:
        """Put right what broken-off passes and dropped requests left, so that the books can be read.

        Asked from another thread than the one that runs the model, a pass may just be under way: it is left alone.
        """
        self.collect_abandoned()
        if threading.get_ident() == self.runner.ident:
            for row in self.live_sequences():
                row.heal()

    def _short_of_slots(self, rows: Sequence[PagedSequence], query_lens: Sequence[int]) -> list[int]:
        """The indices of rows whose own pages can't take their new tokens; most decode steps open few pages."""
        for row in rows:
            if row.step is not None or row.trims:
                row.heal()
        return [index for index, (row, count) in enumerate(zip(rows, query_lens, strict=True)) if row.slots < count]

    def forget_places(self) -> None:
        """Pages have moved: block tables, and what passes under way have made of them, are made again."""
        self.batches.recent.clear()
        for row in self.live_sequences():
            if row.step is not None:
                for group in row.step.groups:
                    group.forget()

    def enter(self) -> None:
        """Called before pages change hands: frees what was dropped and makes the arrays usable in this thread.

        Raises CacheStateError after detach, or if another thread left a step unevaluated (its arrays can't be used
        here).
        """
        if self.closed:
            raise CacheStateError("the model was detached from tinykv; make a new prompt cache for it")
        self.collect_abandoned()
        self.runner.take_over(self)
