"""Models are attached as mlx-lm loads them, and let go when mlx-lm does."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm import utils
from mlx_lm.models.cache import KVCache, make_prompt_cache

from tinykv_plugin.cache import PagedKVCache
from tinykv_plugin.cli.models import AttachedModels, model_label
from tinykv_plugin.config import KVCacheConfig


def use(model: object) -> None:
    """One forward pass of ``model``, an mlx-lm model."""
    cache = make_prompt_cache(model)
    assert type(cache[0]) is PagedKVCache
    mx.eval(model(mx.array([[5, 6, 7]]), cache=cache))  # type: ignore[operator]


def test_models_are_attached_and_detached(tiny_model_dir: Path) -> None:
    with AttachedModels(KVCacheConfig(page_size=8)) as models:
        first, _ = utils.load(str(tiny_model_dir))
        second, _ = utils.load_model(model_path=tiny_model_dir)
        use(first)
        kv = models.find(first)
        assert kv is not None
        assert kv.config.page_size == 8
        assert models.find(second) is not kv
        assert models.find(object()) is None
        assert [report.label for report in models.reports()] == ["tiny"]
        use(second)
        assert [report.label for report in models.reports()] == ["tiny", "tiny"]
    assert not kv.attached
    assert all(type(make_prompt_cache(model)[0]) is KVCache for model in (first, second))


@pytest.mark.parametrize("stats", [True, False])
def test_a_model_that_mlx_lm_dropped_is_let_go(tiny_model_dir: Path, stats: bool) -> None:
    with AttachedModels(KVCacheConfig(stats=stats)) as models:
        first, _ = utils.load(str(tiny_model_dir))
        kept, _ = utils.load(str(tiny_model_dir))
        use(first)
        use(kept)
        gone = weakref.ref(first)
        del first
        gc.collect()
        assert gone() is not None
        third, _ = utils.load(str(tiny_model_dir))
        assert gone() is None
        assert models.find(kept) is not None
        use(third)
        # The numbers of a model that is gone are kept if they'll be printed.
        assert len(models.reports()) == (3 if stats else 2)


def test_dense_leaves_models_alone(tiny_model_dir: Path) -> None:
    with AttachedModels(KVCacheConfig(cache="dense", stats=True)) as models:
        model, _ = utils.load(str(tiny_model_dir))
        assert "make_cache" not in vars(model)
        assert models.find(model) is None
        assert models.reports() == []


def test_labels_are_what_people_call_a_model() -> None:
    assert model_label(Path("/models/Llama-3")) == "Llama-3"
    cached = Path("/home/me/.cache/huggingface/hub/models--mlx-community--Llama-3.2-3B/snapshots/0123abcd")
    assert model_label(cached) == "mlx-community/Llama-3.2-3B"
    assert model_label(Path(".")) == "."
