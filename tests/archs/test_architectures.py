"""Every architecture of mlx-lm on every path, against the same model with mlx-lm's own caches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import oracle
import pytest
from common import only_general
from found import Found, layers_of
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import can_trim_prompt_cache
from paths import PATHS, quantized, save
from tiny import registry

import tinykv_plugin as tinykv
from tinykv_plugin.manager import default_manager
from tinykv_plugin.trace import ADDED_MASK

# What can't be had, and why; the tests say so if it can after all.
CANNOT = {
    ("afm7", "max_kv_size"): "mlx-lm takes positions from the number of keys kept: its limited caches are wrong",
    ("deepseek_v41", "drafts"): "its cache drops what is behind its window and can't be put back; refused by name",
    ("deepseek_v41", "save"): "mlx-lm can't write its cache to a file",
    ("glm_moe_dsa", "max_kv_size"): "nothing to compare with: its indexer breaks ties by the order in mlx-lm's cache",
    ("minimax_m3_vl", "max_kv_size"): "nothing to compare with: mlx-lm cuts blocks over the slots of its cache",
    ("phi3small", "max_kv_size"): "its sparse layers pick blocks of the whole context; refused by name",
}
# The paths on which pages are read, and so differ from backend to backend.
READING = ("single", "chunks", "batch", "fork", "trim", "save", "max_kv_size")


@pytest.mark.parametrize("name", registry.NAMES)
def test_paged_caches_equal_mlx_lms_own(name: str, found: Found, tmp_path: Path, request: Any) -> None:
    """On gather. If only the table differs: tox run -e archs -- --write-models"""
    with tinykv.attach(registry.shared(name), attention="gather", page_size=4) as kv:
        assert adapter_of(kv) != "general", "no adapter knows this model"
        assert not any("expected" in line.reason for line in kv.plan), kv.plan[0].reason
        row = {"family": registry.family_of(name), "adapter": adapter_of(kv), **layers_of(kv)}
        failures = {}
        for path in PATHS:
            try:
                row[path] = save(name, kv, tmp_path) if path == "save" else PATHS[path](name, kv)
                kv.check()
                assert kv.stats().pages_used == 0, "pages are still held"
            except Exception as error:
                row[path] = "no"
                if (name, path) not in CANNOT:
                    failures[path] = f"{type(error).__name__}: {error}"
            else:
                # Recurrent state can't be trimmed, and drafts find another way.
                if path != "trim":
                    assert (row[path] == "no") == ((name, path) in CANNOT), f"{path}: {row[path]}"
        try:
            row["quantized"] = quantized(name)
        except Exception as error:
            failures["quantized"] = f"{type(error).__name__}: {error}"
        assert not failures, "\n".join(f"{path}: {failure}" for path, failure in failures.items())
    row["stock_batch"] = stock_batch(name)
    row["cannot"] = {path: reason for (model, path), reason in CANNOT.items() if model == name}
    found.rows[name] = row
    if found.comparable and not request.config.getoption("--write-models"):
        assert row == found.row_of(name), "docs/models.json says something else: tox run -e archs -- --write-models"


@pytest.mark.parametrize("backend", ["cpu"])
@pytest.mark.parametrize("name", registry.NAMES)
def test_backends_that_read_pages_equal_mlx_lms_own(name: str, backend: str, tmp_path: Path) -> None:
    needs(backend)
    with tinykv.attach(registry.shared(name), attention=backend, page_size=8) as kv:
        if not any(line.attention == "direct" for line in kv.plan):
            assert all(not line.reason.startswith("no backend") for line in kv.plan), "there must be a reason"
            return
        for path in READING:
            if (name, path) not in CANNOT:
                _ = save(name, kv, tmp_path) if path == "save" else PATHS[path](name, kv)
                kv.check()


@pytest.mark.parametrize("name", registry.NAMES)
def test_without_its_adapter_a_model_gives_the_same_or_the_plan_says_what_it_cant(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = registry.shared(name)
    with tinykv.attach(model, attention="gather", page_size=4) as kv:
        served = [replace(line, reason="") for line in kv.plan], kv.session.separate  # type: ignore[attr-defined]
        replaced = len(kv._replaced)
    with tinykv.attach(model, attention="gather", page_size=4, plugins=only_general()) as kv:
        if served == ([replace(line, reason="") for line in kv.plan], kv.session.separate) and (  # type: ignore[attr-defined]
            replaced == len(kv._replaced)
        ):
            return  # served alike
        paths = ["single", "chunks", "fork", "trim", "batch"]
        if name == "phi3small":
            # mlx-lm's own code is as wrong; with the same chunks it is wrong in the same way.
            assert all(ADDED_MASK in line.reason for line in kv.plan)
            monkeypatch.setattr(oracle, "steps_of", lambda name, tokens: tokens)
            oracle.solo.cache_clear()
            paths = ["single", "chunks", "fork"]
        if name == "olmo":
            assert all("can't run on paged caches" in line.reason for line in kv.plan)
            return  # nor on mlx-lm's own
        if "trim" in paths and not can_trim_prompt_cache(used(kv)):
            paths.remove("trim")
        for path in paths:
            PATHS[path](name, kv)
            kv.check()
    oracle.solo.cache_clear()


@pytest.mark.parametrize("name", registry.NAMES)
def test_quantized_weights_in_half_precision_are_what_the_adapter_expects(name: str) -> None:
    """As checkpoints are; nothing is computed."""
    model = registry.make(name, wide=True)
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=32, bits=8, class_predicate=lambda _, part: registry.quantizable(part))
    with tinykv.attach(model, attention="gather") as kv:
        assert not any("expected" in line.reason for line in kv.plan), kv.plan[-1].reason
        assert bool(kv.session.separate) == (name == "deepseek_v41")  # type: ignore[attr-defined]


def used(kv: tinykv.Attachment) -> list[Any]:
    """Caches that have dropped what is behind their windows."""
    caches = kv.make_cache()
    oracle.feed(kv.model, caches, oracle.prompt(20))
    return caches


def needs(backend: str) -> None:
    """Skip unless ``backend`` can be used here."""
    for candidate in default_manager().backends("auto"):
        if candidate.name == backend:
            with tinykv.attach(registry.make("llama"), attention="auto") as kv:
                if kv.plan[0].backend == backend:
                    return
                pytest.skip(f"the backend {backend!r} can't be used here: {kv.plan[0].reason}")
    pytest.skip(f"the distribution with the backend {backend!r} is not installed")


def adapter_of(kv: tinykv.Attachment) -> str:
    return default_manager().adapter(kv.model).name


def stock_batch(name: str) -> str:
    """How mlx-lm's own batch of the same prompts compares with its own single requests."""
    try:
        runs = oracle.staggered(BatchGenerator, registry.shared(name))
        solos = [oracle.solo(name, tuple(tokens)) for tokens in oracle.PROMPTS]
        apart = max(run.difference(solo) for run, solo in zip(runs, solos, strict=True))
    except Exception as error:
        return f"raises {type(error).__name__}"
    return "equal" if apart < oracle.TOLERANCE else "differs"
