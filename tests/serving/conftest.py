"""Tiny models on disk, and servers that are stopped and checked after each test."""

from __future__ import annotations

import argparse
import functools
import gc
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import models
import pytest
from mlx_lm.generate import StopSequences
from served import ARGUMENTS, KEPT_THREADS, Server, save_tokenizer, start_paged, start_stock, wait_until

from tinykv_plugin.serving import ticket
from tinykv_plugin.serving.response_generator import PagedResponseGenerator


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """After a test there are no threads that weren't there before."""
    before = set(threading.enumerate())
    yield
    kept = before | KEPT_THREADS
    wait_until(lambda: set(threading.enumerate()) <= kept, what=lambda: f"{set(threading.enumerate()) - kept} to end")


@pytest.fixture(scope="session", autouse=True)
def fast_collections() -> Iterator[None]:
    """mlx-lm's server collects garbage each time it loads a model: not among what is there anyway."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def attentive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that have gone are noticed sooner than by default."""
    monkeypatch.setattr(ticket, "LOOK_SECONDS", 0.02)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder that mlx_lm.load reads: ``model_dir("llama", seed=3, …)``; the same one for the same arguments."""

    @functools.cache
    def make(kind: str = "llama", seed: int = 3, **fields: Any) -> Path:
        from mlx_lm.utils import save_model

        folder = tmp_path_factory.mktemp("models") / kind
        folder.mkdir()
        config = {"model_type": kind} | models.CONFIGS[kind] | fields
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_model(folder, models.make(kind, seed, **fields))
        save_tokenizer(folder, config["vocab_size"])
        return folder

    return make


@pytest.fixture
def serve(model_dir: Callable[..., Path]) -> Iterator[Callable[..., Server]]:
    """``serve(memory="1MiB", max_queue=4, decode_concurrency=2, …)``: a server, with our settings and mlx-lm's."""
    stops: list[Callable[[], None]] = []

    def start(kind: str = "llama", folder: Path | None = None, **options: Any) -> Server:
        arguments = {name: options.pop(name, default) for name, default in ARGUMENTS.items()}
        path = str(folder or model_dir(kind))
        server, stop = start_paged(argparse.Namespace(model=path, **arguments), **options)
        stops.append(stop)
        return server

    yield start
    for stop in reversed(stops):
        stop()


@pytest.fixture
def together() -> Iterator[Callable[..., list[Any]]]:
    """``together(call, items)``: the results of calls made by as many threads at once, exceptions included."""
    pools: list[ThreadPoolExecutor] = []

    def run(call: Callable[[Any], Any], items: Any) -> list[Any]:
        items = list(items)
        pool = ThreadPoolExecutor(len(items))
        pools.append(pool)

        def safely(item: Any) -> Any:
            try:
                return call(item)
            except Exception as error:
                return error

        return list(pool.map(safely, items))

    yield run
    for pool in pools:
        pool.shutdown()


@pytest.fixture(scope="session")
def stock(model_dir: Callable[..., Path]) -> Iterator[Callable[..., Server]]:
    """``stock("gemma3_text", …)``: mlx-lm's own server, the same one for the same arguments, to compare with."""
    stops: list[Callable[[], None]] = []

    @functools.cache
    def start(kind: str = "llama", **options: Any) -> Server:
        folder = model_dir(kind)
        server, stop = start_stock(argparse.Namespace(model=str(folder), **{**ARGUMENTS, **options}))
        stops.append(stop)
        return server

    yield start
    for stop in stops:
        stop()


@pytest.fixture
def no_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are as long as they may be: a stop token ends nothing."""
    make = PagedResponseGenerator._make_state_machine

    def make_without(*args: Any) -> Any:
        return StopSequences(), make(*args)[1]

    monkeypatch.setattr(PagedResponseGenerator, "_make_state_machine", make_without)
