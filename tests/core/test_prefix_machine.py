"""Any interleaving of asking, processing, storing, cancelling, evicting, restarting: what is found is as if run cold.

The keys, values and recurrent states of a token are a digest of all tokens up to it, so whatever comes from another
text, or from another place in this one, shows.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any, ClassVar

import hypothesis.strategies as st
import mlx.core as mx
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from mlx_lm.models.cache import ArraysCache
from models import prompt, shared

import tinykv_plugin as tinykv
from tinykv_plugin.errors import OutOfPagesError, PoolGrowthError
from tinykv_plugin.layout import leaves

HEADS, DIM = 2, 16
TRUNKS = [prompt(40), [*prompt(40)[:13], *prompt(40, 2)]]
BRANCH = prompt(12, 1)
CUTS = st.sampled_from([0, 3, 8, 13, 14, 20, 31, 40])


def digest(tokens: list[int]) -> float:
    """A number that float32 holds, for everything up to the last of ``tokens``."""
    return float(zlib.crc32(str(tokens).encode()) & 0xFFFFF)


class Request:
    """A prompt, of which ``done`` tokens are in ``caches``; ``broken``: a pass broke off in the middle."""

    def __init__(self, caches: Any, tokens: list[int], done: int) -> None:
        self.caches = caches
        self.tokens = tokens
        self.done = done
        self.broken = False

    def run(self, count: int) -> None:
        """A forward pass over the next tokens, layer by layer."""
        count = min(count, len(self.tokens) - self.done)
        if not count or self.broken:
            return
        after = [digest(self.tokens[: self.done + index + 1]) for index in range(count)]
        rows = mx.broadcast_to(mx.array(after)[None, None, :, None], (1, HEADS, count, DIM))
        try:
            for leaf in leaves(self.caches):
                if isinstance(leaf, ArraysCache):
                    leaf.cache = [mx.array([[after[-1]]]) for _ in leaf.cache]
                else:
                    leaf.update_and_fetch(rows, -rows)
        except (OutOfPagesError, PoolGrowthError):
            self.broken = True
            return
        mx.eval([leaf.state for leaf in leaves(self.caches)])
        self.done += count

    def verify(self) -> None:
        if self.broken:
            return
        for leaf in leaves(self.caches):
            if isinstance(leaf, ArraysCache):
                held = [None if side is None else side.item() for side in leaf.cache]
                assert held == [digest(self.tokens[: self.done]) if self.done else None] * len(held)
                continue
            assert leaf.offset == self.done
            if self.done:
                keys, values = leaf.keys_and_values()
                seen = min(self.done, leaf.window or self.done)
                count = min(seen, keys.shape[2])
                assert count >= seen - (leaf.window is not None)  # the next token doesn't see the oldest
                expected = [digest(self.tokens[: self.done - back]) for back in reversed(range(count))]
                assert keys[0, 0, -count:, 0].tolist() == expected
                assert mx.array_equal(keys, -values)


class PrefixMachine(RuleBasedStateMachine):
    requests = Bundle("requests")
    model: ClassVar[tuple[str, dict[str, Any]]]
    limits: ClassVar[dict[str, Any]]

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.live: list[Request] = []
        self.attach()

    def attach(self) -> None:
        kind, fields = self.model
        self.kv = tinykv.attach(shared(kind, **fields), page_size=4, prefix_dir=str(self.folder), **self.limits)

    @rule(target=requests, trunk=st.sampled_from(TRUNKS), cut=CUTS, more=st.sampled_from([1, 2, 5, 12]))
    def ask(self, trunk: list[int], cut: int, more: int) -> Request:
        return self.asked(trunk[:cut] + BRANCH[:more])

    def asked(self, tokens: list[int]) -> Request:
        caches, rest = self.kv.prefix_cache.fetch(tokens)
        assert rest
        assert tokens[len(tokens) - len(rest) :] == rest
        request = Request(caches, tokens, len(tokens) - len(rest))
        self.live.append(request)
        return request

    @rule(target=requests, trunk=st.sampled_from(TRUNKS), cut=CUTS, chunk=st.integers(3, 20), unfinished=st.booleans())
    def serve(self, trunk: list[int], cut: int, chunk: int, unfinished: bool) -> Request:
        """A whole request: its prompt is stored at its end, or between its chunks too."""
        request = self.asked(trunk[:cut] + BRANCH[:2])
        while request.done < len(request.tokens) and not request.broken:
            request.run(chunk)
            self.store(request, 0, unfinished)
        return request

    @rule(target=requests, request=requests, back=st.sampled_from([0, 0, 1, 4]), more=st.integers(1, 5))
    def ask_alike(self, request: Request, back: int, more: int) -> Request:
        """A prompt that begins like one that is being processed."""
        return self.asked(request.tokens[: max(0, request.done - back)] + BRANCH[:more])

    @rule(request=requests, count=st.integers(1, 20))
    def run(self, request: Request, count: int) -> None:
        if request in self.live:
            request.run(count)

    @rule(request=requests, trunk=st.sampled_from(TRUNKS), start=st.integers(0, 30), count=st.integers(1, 9))
    def go_on(self, request: Request, trunk: list[int], start: int, count: int) -> None:
        """Its answer, or the next turn of a chat; some of them continue the prompt as another one does."""
        request.tokens = request.tokens + trunk[start : start + count]

    @rule(request=requests, short=st.sampled_from([0, 0, 0, 1, 5]), unfinished=st.booleans())
    def store(self, request: Request, short: int, unfinished: bool) -> None:
        if request not in self.live:
            return
        prefix = self.kv.prefix_cache
        (prefix.insert_unfinished if unfinished else prefix.insert)(
            request.tokens[: max(0, request.done - short)], request.caches
        )

    @rule(request=consumes(requests))
    def cancel(self, request: Request) -> None:
        request.caches = []
        with contextlib.suppress(ValueError):
            self.live.remove(request)

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        self.kv.prefix_cache.eviction.evict(count)

    @rule()
    def evict_prompt(self) -> None:
        self.kv.prefix_cache.eviction.evict_prompt()

    @rule()
    def clear(self) -> None:
        self.kv.prefix_cache.clear()

    @rule()
    def written(self) -> None:
        self.kv.prefix_cache.flush()

    @rule()
    def restart(self) -> None:
        self.drop_all()
        self.kv.detach()
        self.attach()

    @rule(number=st.integers(0, 50))
    def lose_a_file(self, number: int) -> None:
        """As another process does that keeps to its limit."""
        for path in sorted(self.folder.rglob("*.safetensors"))[number : number + 1]:
            path.unlink(missing_ok=True)

    @invariant()
    def holds(self) -> None:
        self.kv.check()
        for request in self.live:
            request.verify()

    def drop_all(self) -> None:
        for request in self.live:
            request.caches = []
        self.live.clear()
        self.kv.check()
        assert self.kv.stats().pages_used == 0

    def teardown(self) -> None:
        self.drop_all()
        self.kv.detach()
        shutil.rmtree(self.folder)


class Recurrent(PrefixMachine):
    model = ("qwen3_next", {"num_hidden_layers": 2})
    # Room for eight states or so, in memory and on disk.
    limits: ClassVar[dict[str, Any]] = {
        "max_pages": 24,
        "memory": "64KiB",
        "prefix_states": 0.001,
        "prefix_disk": 60_000,
    }


class Windowed(PrefixMachine):
    model = ("gemma3_text", {"num_hidden_layers": 2, "sliding_window": 6})
    limits: ClassVar[dict[str, Any]] = {"max_pages": 24, "rewind": 3, "prefix_disk": 60_000}


TestRecurrent = Recurrent.TestCase
TestRecurrent.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)

TestWindowed = Windowed.TestCase
TestWindowed.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
