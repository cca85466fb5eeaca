"""Prompts that are stored while they are processed: models run only what is new, and the answers are as if cold."""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_cache
from mlx_lm.sample_utils import make_repetition_penalty
from models import greedy, largest_difference, logits, make, prompt, shared

import tinykv_plugin as tinykv
from tinykv_plugin.errors import DraftError
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


def loop(name: str) -> Any:
    """mlx-lm's loop as it finds it itself while a model is attached."""
    return getattr(sys.modules["mlx_lm.generate"], name)


def answer(model: Any, draft: Any, store: PagedPromptCache, tokens: list[int], count: int, stop: int) -> list[int]:
    """As the server answers: what is stored is fetched, and stored again; nobody asks further after ``stop`` tokens."""
    cache, rest = store.fetch_nearest_cache(None, tokens)
    steps = loop("speculative_generate_step")(
        mx.array(rest), model, draft, max_tokens=count, num_draft_tokens=3, prompt_cache=cache
    )
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


SINGLE = [FULL, WINDOW, HYBRID, RECURRENT]


def single(model: Any, tokens: list[int], count: int, cache: Any, **options: Any) -> list[int]:
    """The next ``count`` tokens by mlx-lm's loop without drafts."""
    steps = loop("generate_step")(mx.array(tokens), model, max_tokens=count, prompt_cache=cache, **options)
    return [int(token) for token, _ in steps]


def asked(kv: Any, tokens: list[int], count: int = 20, **options: Any) -> tuple[list[int], int]:
    """An answer as an author gets it, and the tokens of the prompt that were run."""
    cache, rest = kv.prefix_cache.fetch(tokens)
    with Counted(kv.model)() as run:
        found = single(kv.model, rest, count, cache, **options)
    assert run[0] == len(rest) + count
    kv.prefix_cache.insert([*tokens, *found], cache)
    kv.check()
    return found, len(rest)


@pytest.mark.parametrize("chunk", [512, 7])
@pytest.mark.parametrize("kind", SINGLE)
def test_a_prompt_that_is_run_alone_is_stored_at_its_end_and_in_between(kind: str, chunk: int) -> None:
    """Its answer is longer than the window, and recurrent layers have gone on."""
    model = shared(kind, **fields(kind))
    first, other = prompt(41), [*prompt(41)[:30], *prompt(9, 2)]
    expected = [greedy(model, tokens, 20) for tokens in (first, other)]
    with tinykv.attach(model, page_size=PAGE, prefix_interval=8, rewind=4) as kv:
        assert asked(kv, first, prefill_step_size=chunk) == (expected[0], 41)
        assert asked(kv, first, prefill_step_size=chunk) == (expected[0], 1)
        # The other one parts from it after 30 tokens: the last place before is 24, or the end of a chunk.
        places = 30 if kind in (FULL, WINDOW) else 24
        assert asked(kv, other, prefill_step_size=chunk) == (expected[1], len(other) - places)
        again, ran = asked(kv, other, prefill_step_size=chunk)
        assert again == expected[1]
        assert ran <= (PAGE if kind == WINDOW else 1)  # the window has dropped the page that the prompt ends in


@pytest.mark.parametrize("length", [31, 32, 33])
@pytest.mark.parametrize("kind", SINGLE)
def test_at_most_the_last_page_is_run_again_and_after_a_restart_too(kind: str, length: int, tmp_path: Path) -> None:
    model = shared(kind, **fields(kind))
    tokens = prompt(length)
    # Its answer is so long that windows have passed the prompt.
    settings = {"page_size": 16, "prefix_interval": 16, "prefix_dir": str(tmp_path)}
    expected = greedy(model, tokens, 30)
    most = 16 if kind == WINDOW else 1
    with tinykv.attach(model, **settings) as kv:
        assert asked(kv, tokens, 30) == (expected, length)
        again, ran = asked(kv, tokens, 30)
        assert (again, ran <= most) == (expected, True)
    with tinykv.attach(model, **settings) as kv:
        again, ran = asked(kv, tokens, 30)
        assert (again, ran <= 16) == (expected, True)


@pytest.mark.parametrize("kind", [FULL, HYBRID])
def test_a_penalty_counts_the_whole_prompt_whatever_of_it_is_stored(kind: str) -> None:
    model = shared(kind, **fields(kind))
    processors = [make_repetition_penalty(1.5, context_size=30)]
    expected = greedy(model, prompt(21), 20, logits_processors=processors)
    assert expected != greedy(model, prompt(21), 20)
    with tinykv.attach(model, page_size=PAGE, prefix_interval=8) as kv:
        for run in (21, 1):
            assert asked(kv, prompt(21), logits_processors=processors) == (expected, run)


@pytest.mark.parametrize("kind", [FULL, HYBRID])
def test_what_stands_for_an_image_is_no_token_for_a_penalty(kind: str) -> None:
    """As in mlx-lm's server, which has negative numbers there; no logits have such places."""
    model = shared(kind, **fields(kind))
    image, tokens = [-(1 << 50), *prompt(20)], [0, *prompt(20)]
    processors = [make_repetition_penalty(1.5, context_size=30)]
    with tinykv.attach(model, page_size=PAGE) as kv:
        cache = kv.make_cache()
        expected = single(model, tokens, 20, cache, logits_processors=[lambda seen, out: processors[0](seen[1:], out)])
        cache = kv.make_cache()
        logits(model, tokens[:-1], cache)
        kv.prefix_cache.insert(image[:-1], cache)
        cache, rest = kv.prefix_cache.fetch(image)
        assert rest == image[-1:]
        assert single(model, rest, 20, cache, logits_processors=processors) == expected


@pytest.mark.parametrize("kind", SINGLE)
def test_a_prompt_can_go_on_with_the_same_caches(kind: str) -> None:
    """As a chat does: turn after turn, each stored at its end."""
    model = shared(kind, **fields(kind))
    turns = [prompt(21), prompt(6, 1), prompt(15, 2)]
    plain: list[Any] = make_cache(model)
    expected = [greedy(model, turn, 12, plain) for turn in turns]
    with tinykv.attach(model, page_size=PAGE, rewind=4) as kv:
        cache, rest = kv.prefix_cache.fetch(turns[0])
        whole = list[int]()
        for turn, answer in zip([rest, *turns[1:]], expected, strict=True):
            assert single(model, turn, 12, cache) == answer
            whole += turn
            kv.check()
            for tokens in (whole, [*whole, 3]):
                _, left = kv.prefix_cache.fetch(tokens)
                assert len(left) <= PAGE + 1, tokens
            cold = greedy(model, [*whole, 3], 5, kv.make_cache())
            assert asked(kv, [*whole, 3], 5)[0] == cold
            whole += answer


def make_cache(model: Any) -> list[Any]:
    caches: list[Any] = mlx_cache.make_prompt_cache(model)
    return caches


@pytest.mark.parametrize("kind", SINGLE)
def test_caches_that_somebody_else_has_used_are_not_stored_for_what_they_held(kind: str) -> None:
    model = shared(kind, **fields(kind))
    tokens, others, rest = prompt(21), prompt(4, 5), prompt(6, 1)
    with tinykv.attach(model, page_size=PAGE, rewind=4) as kv:
        cache, left = kv.prefix_cache.fetch(tokens)
        first = single(model, left, 1, cache)
        if kind in (FULL, WINDOW):
            mlx_cache.trim_prompt_cache(cache, 4)
        logits(model, others, cache)
        before = [*tokens, *first][:-4] if kind in (FULL, WINDOW) else [*tokens, *first]
        expected = greedy(model, [*before, *others, *rest], 5, kv.make_cache())
        assert single(model, rest, 5, cache) == expected
        stored = len(kv.prefix_cache.index.tree)
        kv.prefix_cache.clear()
        assert single(model, rest, 5, cache)
        assert (stored > 0, len(kv.prefix_cache.index.tree)) == (True, 0), "nothing more was stored"
        copied = copy.deepcopy(kv.prefix_cache.fetch(tokens)[0])
        assert type(copied) is list
        assert single(model, tokens, 1, copied) == first


@pytest.mark.parametrize("kind", [FULL, HYBRID])
def test_embeddings_in_place_of_tokens(kind: str) -> None:
    """As a server runs images: the tokens that a prompt is stored by stand for them."""
    model = shared(kind, **fields(kind))
    takes = "input_embeddings" in inspect.signature(type(model).__call__).parameters
    tokens, ids = prompt(21), [1 << 40, *prompt(21)[1:]]
    embeddings = model.model.embed_tokens(mx.array(tokens))
    expected = greedy(model, tokens, 8)
    with tinykv.attach(model, page_size=PAGE, prefix_interval=8) as kv:
        cache, rest = kv.prefix_cache.fetch(ids)
        if not takes:
            with pytest.raises(ValueError, match="does not support input embeddings"):
                single(model, tokens, 8, cache, input_embeddings=embeddings)
            return
        assert single(model, tokens, 8, cache, input_embeddings=embeddings) == expected
        assert len(kv.prefix_cache.fetch(tokens)[1]) == 21
        cache, rest = kv.prefix_cache.fetch(ids)
        assert rest == ids[-1:]
        assert single(model, rest, 8, cache) == expected
        # Embeddings of something else than what was looked up.
        cache, _ = kv.prefix_cache.fetch(prompt(9, 4))
        assert single(model, tokens, 8, cache, input_embeddings=embeddings) == expected
        assert len(kv.prefix_cache.fetch(prompt(9, 4))[1]) == 9


@pytest.mark.parametrize(("kind", "draft_kind"), [(FULL, WINDOW), (HYBRID, FULL), (RECURRENT, RECURRENT)])
def test_an_author_with_drafts(kind: str, draft_kind: str) -> None:
    """What was fetched with the draft model's is found again by both, turn after turn with the same caches."""
    model, draft = shared(kind, **fields(kind)), similar(draft_kind)
    turns, counted = [prompt(41), prompt(7, 2)], Counted(model, draft)
    with (
        tinykv.attach(model, page_size=PAGE) as kv,
        tinykv.attach(draft, page_size=PAGE, budget_of=kv) as draft_kv,
    ):

        def drafted(tokens: list[int], cache: Any) -> list[int]:
            steps = loop("speculative_generate_step")(
                mx.array(tokens), model, draft, max_tokens=12, num_draft_tokens=3, prompt_cache=cache
            )
            return [int(token) for token, _, _ in steps]

        first = greedy(model, turns[0], 12, kv.make_cache())
        # The last token was not run: it begins the next turn.
        second = greedy(model, [*turns[0], *first, *turns[1]], 12, kv.make_cache())
        for most in (100, PAGE):
            cache, rest = kv.prefix_cache.fetch(turns[0], draft=draft_kv.prefix_cache)
            assert len(rest) <= most
            with counted() as run:
                assert drafted(rest, cache) == first
            assert most == 100 or max(run) <= PAGE + 9 * 12
            held = cache.parts[0].count
            assert drafted([*turns[0], *first, *turns[1]][held:], cache) == second
            whole = [*turns[0], *first, *turns[1], *second]
            assert kv.prefix_cache.insert(whole, cache) >= len(whole) - PAGE
            kv.check()
            draft_kv.check()
            for each in (kv, draft_kv):
                mine, left = each.prefix_cache.fetch(whole)
                assert len(left) <= PAGE + 1
                cold = logits(each.model, whole, each.make_cache())[-1]
                assert largest_difference(logits(each.model, left, mine)[-1], cold) < 1e-4
        # Without the draft model's caches mlx-lm's loop can't begin; with new ones its drafts are worse, no more.
        cache, rest = kv.prefix_cache.fetch(turns[0])
        with pytest.raises(DraftError, match="the draft model's are missing"):
            drafted(rest, cache)
        assert drafted(rest, [*cache, *draft_kv.make_cache()]) == first
        kv.check()
        draft_kv.check()


def test_after_drafts_somebody_elses_use_is_noticed() -> None:
    model, draft = shared(FULL, **fields(FULL)), similar(FULL)
    with tinykv.attach(model, page_size=PAGE) as kv, tinykv.attach(draft, page_size=PAGE, budget_of=kv) as draft_kv:
        cache, rest = kv.prefix_cache.fetch(prompt(21), draft=draft_kv.prefix_cache)
        logits(model, rest, cache.parts[0].caches)
        assert not cache.known
        assert kv.prefix_cache.insert(prompt(21), cache) == 21
        assert (len(kv.prefix_cache), len(draft_kv.prefix_cache)) == (1, 0)
