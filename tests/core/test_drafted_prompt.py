"""Stored prompts with a draft model: both models run only what is new, and the answers are the model's own."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest
from models import greedy, make, prompt, shared

import tinykv_plugin as tinykv
from tinykv_plugin.serving.prompt_cache import PagedPromptCache

PAGE = 4
TWO = {"num_hidden_layers": 2}
FULL, WINDOW, HYBRID, RECURRENT = "llama", "gemma3_text", "qwen3_next", "mamba"
WINDOWED = {"sliding_window": 8}
PAIRS = [
    (FULL, FULL, {}),
    (WINDOW, FULL, {}),
    (HYBRID, FULL, {}),
    (FULL, WINDOW, {}),
    (HYBRID, WINDOW, {}),
    (FULL, HYBRID, {}),
    (HYBRID, HYBRID, {}),
    (RECURRENT, RECURRENT, {}),
    (FULL, RECURRENT, {}),
    (FULL, FULL, {"max_kv_size": 24}),
    (HYBRID, WINDOW, {"max_kv_size": 24}),
]


def fields(kind: str) -> dict[str, Any]:
    return {**TWO, **(WINDOWED if kind == WINDOW else {})} if kind != HYBRID else TWO


def similar(kind: str) -> Any:
    """A draft model that agrees with the target now and then: its weights, slightly changed."""
    draft = make(kind, **fields(kind))
    mx.random.seed(1)
    draft.apply(lambda weight: weight + 0.02 * mx.random.normal(weight.shape) if weight.ndim > 1 else weight)
    mx.eval(draft.parameters())
    return draft


class Counted:
    """Counts the tokens that two models run."""

    def __init__(self, *models: Any) -> None:
        self._models = models
        self.tokens = [0] * len(models)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[list[int]]:
        patch = pytest.MonkeyPatch()
        run = self.tokens = [0] * len(self._models)
        for kind in {type(model) for model in self._models}:
            patch.setattr(kind, "__call__", self._counting(kind.__call__))
        try:
            yield run
        finally:
            patch.undo()

    def _counting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(model: Any, inputs: mx.array, *args: Any, **options: Any) -> Any:
            for index, each in enumerate(self._models):
                if model is each:
                    self.tokens[index] += inputs.size
            return original(model, inputs, *args, **options)

        return call


def answer(model: Any, draft: Any, store: PagedPromptCache, tokens: list[int], count: int, stop: int) -> list[int]:
    """As the server answers: what is stored is fetched, and stored again; nobody asks further after ``stop`` tokens."""
    cache, rest = store.fetch_nearest_cache(None, tokens)
    loop = sys.modules["mlx_lm.generate"].speculative_generate_step
    steps = loop(mx.array(rest), model, draft, max_tokens=count, num_draft_tokens=3, prompt_cache=cache)
    found = []
    for token, _, _ in steps:
        found.append(int(token))
        if len(found) == stop:
            break
    steps.close()
    store.insert_cache(None, [*tokens, *found], cache)
    return found


@pytest.mark.parametrize(("kind", "draft_kind", "settings"), PAIRS)
def test_both_models_run_only_what_is_new(kind: str, draft_kind: str, settings: dict[str, Any]) -> None:
    model, draft = shared(kind, **fields(kind)), similar(draft_kind)
    recurrent = kind in (HYBRID, RECURRENT)
    first, counted = prompt(41), Counted(model, draft)
    with (
        tinykv.attach(model, page_size=PAGE, **settings) as kv,
        tinykv.attach(draft, page_size=PAGE, budget_of=kv, **settings) as draft_kv,
    ):

        def alone(tokens: list[int], count: int = 30) -> list[int]:
            return greedy(model, tokens, count, kv.make_cache())

        store = PagedPromptCache()
        store.use([kv.prefix_cache, draft_kv.prefix_cache], settings.get("max_kv_size"))
        expected = alone(first)
        for stop in (30, 17, 29):
            with counted() as run:
                assert answer(model, draft, store, first, 30, stop) == expected[:stop]
            if stop != 30:
                # With every draft wrong; recurrent layers run again as many tokens as there are drafts, at most.
                assert run[0] <= PAGE + (9 if recurrent else 4) * stop and run[1] <= PAGE + 8 * stop, run
            kv.check()
            draft_kv.check()
            found, rest = store.fetch_nearest_cache(None, first)
            assert found is not None
            if stop == 30:
                # A page at most is run again, by the draft model too.
                assert len(rest) <= PAGE
                assert len(first) - found.parts[1].count <= PAGE
            del found
        turn = [*first, *expected[:29], *prompt(7, 2)]
        found, rest = store.fetch_nearest_cache(None, turn)
        assert found is not None
        assert len(rest) <= 7 + 1
        assert len(turn) - found.parts[1].count <= 7 + 1
        del found
        with counted() as run:
            cache, rest = store.fetch_nearest_cache(None, turn)
            cold = alone(turn, 1)
            run[:] = [0, 0]
            assert answer(model, draft, store, turn, 1, 1) == cold
        assert run[0] <= 7 + 1 + 2 and run[1] <= 7 + 1 + 2
        del cache
        kv.check()
        draft_kv.check()


@pytest.mark.parametrize("kind", [FULL, HYBRID])
def test_a_thread_that_ends_leaves_nothing_unfinished(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """As when a server stops: what was stored is still there for another thread."""
    model, draft = shared(kind, **fields(kind)), similar(FULL)
    first = prompt(41)
    with tinykv.attach(model, page_size=PAGE) as kv, tinykv.attach(draft, page_size=PAGE, budget_of=kv) as draft_kv:
        store = PagedPromptCache()
        store.use([kv.prefix_cache, draft_kv.prefix_cache], None)
        served = threading.Thread(target=answer, args=(model, draft, store, first, 30, 17))
        served.start()
        served.join()
        found, rest = store.fetch_nearest_cache(None, first)
        assert found is not None
        assert len(rest) <= PAGE
        del found
        kv.check()
        draft_kv.check()
    assert "a thread ended" not in caplog.text
