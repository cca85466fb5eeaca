"""``generate`` and ``chat`` begin with what is stored of their prompts, and store them."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .models import AttachedModels
from .patches import replaced


@contextlib.contextmanager
def stored_prompts(models: AttachedModels) -> Iterator[None]:
    """While the block runs, mlx-lm's generation loops use the prefix caches of attached models.

    A cache that holds something already, such as a file's or an earlier turn's, is used as it is.
    """
    generate: Any = importlib.import_module("mlx_lm.generate")
    steps = _StoredSteps(models)
    with (
        replaced(generate, "generate_step", steps.single(generate.generate_step)),
        replaced(generate, "speculative_generate_step", steps.drafted(generate.speculative_generate_step)),
    ):
        yield


class _StoredSteps:
    """Wraps mlx-lm's generation loops. Remembers which tokens are in the caches of the conversation under way."""

    def __init__(self, models: AttachedModels) -> None:
        self._models = models
        self._cache: list[Any] | None = None
        self._used: Any = None  # what was given to the loop in its place
        self._tokens: list[int] = []

    def single(self, original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """``generate_step``."""
        from ..storing import HANDLES_PAGES, storing

        original = storing(original)

        def generate_step(prompt: Any, model: Any, *args: Any, **options: Any) -> Iterator[Any]:
            def start(rest: Any, cache: Any) -> Iterator[Any]:
                return original(rest, model, *args, **{**options, "prompt_cache": cache})

            return self._run(prompt, [model], start, options)

        setattr(generate_step, HANDLES_PAGES, True)  # attaching doesn't wrap it once more
        return generate_step

    def drafted(self, original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """``speculative_generate_step``."""
        from ..attachment import is_paged
        from ..drafts import drafting
        from ..storing import HANDLES_PAGES

        original = drafting(original, is_paged)

        def speculative_generate_step(
            prompt: Any, model: Any, draft_model: Any, *args: Any, **options: Any
        ) -> Iterator[Any]:
            def start(rest: Any, cache: Any) -> Iterator[Any]:
                return original(rest, model, draft_model, *args, **{**options, "prompt_cache": cache})

            return self._run(prompt, [model, draft_model], start, options)

        setattr(speculative_generate_step, HANDLES_PAGES, True)  # attaching doesn't wrap it once more
        return speculative_generate_step

    def _run(
        self, prompt: Any, models: Sequence[Any], start: Callable[..., Iterator[Any]], options: dict[str, Any]
    ) -> Iterator[Any]:
        store, given = self._store(models, options.get("max_kv_size")), options.get("prompt_cache")
        if store is None or options.get("input_embeddings") is not None:
            yield from start(prompt, given)
            return
        from mlx_lm.models.cache import make_prompt_cache

        cache: list[Any] = given if given is not None else []
        if given is None:
            limit = {"max_kv_size": options.get("max_kv_size")} if len(models) == 1 else {}
            cache = [layer for model in models for layer in make_prompt_cache(model, **limit)]
        rest, tokens = prompt, prompt.tolist()
        used: Any
        if all(layer.empty() for layer in cache):
            used, left = store.fetch_nearest_cache(None, tokens)
            cache[:] = used
            rest = prompt[len(tokens) - len(left) :]
        elif cache is self._cache:
            tokens, used = self._tokens + tokens, self._used
        else:
            yield from start(prompt, cache)
            return
        steps: Any = start(rest, used)
        answered = False
        try:
            for step in steps:
                tokens.append(int(step[0]))
                answered = True
                yield step
        except GeneratorExit:
            raise  # the caller has had enough
        except BaseException:
            answered = False  # a pass may have broken off
            raise
        finally:
            steps.close()  # takes drafts back
            if answered:
                store.insert_cache(None, tokens, used)
                # The caller's list, which its next turn comes with.
                self._cache = given if used.known else None
                self._used, self._tokens = used, tokens[: used.parts[0].count]

    def _store(self, models: Sequence[Any], max_kv_size: int | None) -> Any:
        """The prefix caches of the models that generate together; None unless all have one."""
        from ..serving.prompt_cache import PagedPromptCache
        from ..session import PagedSession

        found = [self._models.find(model) for model in models]
        if not all(kv is not None and isinstance(kv.session, PagedSession) for kv in found):
            return None
        store = PagedPromptCache()
        store.use([kv.prefix_cache for kv in found if kv is not None], max_kv_size or self._models.config.max_kv_size)
        return store
