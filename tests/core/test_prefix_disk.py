"""Stored prompts on disk: found after a restart and by other processes, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import models
import pytest
from mlx_lm.models import cache as mlx_cache
from test_prefix_cache import assert_as_cold, run

import tinykv_plugin as tinykv
from tinykv_plugin import page_index, page_writer, prefix_store
from tinykv_plugin.errors import ConfigError
from tinykv_plugin.prefix_store import PrefixStore
from tinykv_plugin.prefix_tree import page_hash, token_bytes
from tinykv_plugin.serving.prompt_cache import PagedPromptCache
from tinykv_plugin.stored_prompt import StoredPrompt

FULL, WINDOW, HYBRID, RECURRENT = "llama", "gemma3_text", "qwen3_next", "mamba"


def attached(folder: Path, kind: str = FULL, **fields: Any) -> Any:
    settings = {"page_size": 4, "memory": "4MiB", "prefix_dir": str(folder), **fields}
    return tinykv.attach(models.shared(kind), **settings)


def store(kv: Any, tokens: list[int]) -> None:
    kv.prefix_cache.insert(tokens, run(kv, tokens, chunk=4))


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


@pytest.mark.parametrize("attention", ["auto", "gather"])
@pytest.mark.parametrize("kind", [FULL, WINDOW, HYBRID, RECURRENT])
def test_a_restart_finds_what_was_stored(tmp_path: Path, kind: str, attention: str) -> None:
    tokens = models.prompt(40)
    with attached(tmp_path, kind, attention=attention) as kv:
        for length in (20, 40):
            store(kv, tokens[:length])
    with attached(tmp_path, kind, attention=attention) as kv:
        asked = [*tokens, 1, 2]
        assert assert_as_cold(kv, asked) == 40
        assert kv.prefix_cache.counts.disk_tokens == 40
        # What was loaded is in memory now.
        assert assert_as_cold(kv, asked) == 40
        assert kv.prefix_cache.counts.disk_tokens == 40
        assert assert_as_cold(kv, [*tokens[:20], *models.prompt(4, 3)]) == 20
        kv.check()


@pytest.mark.parametrize("kind", [HYBRID, RECURRENT])
def test_states_inside_a_page_are_found_after_a_restart(tmp_path: Path, kind: str) -> None:
    """The longest place counts at which a state was stored, whatever pages lie behind it."""
    trunk, branch = models.prompt(40), models.prompt(40, 1)
    with attached(tmp_path, kind) as kv:
        for tokens in (trunk[:3], trunk[:18], trunk[:31], trunk[:30] + branch[:9], trunk[:20]):
            store(kv, tokens)
    asked = [(trunk, 31), (trunk[:30] + branch, 39), (trunk[:30] + branch[:8], 20), (trunk[:19], 18), (trunk[:7], 3)]
    for tokens, found in asked[1:3]:
        with attached(tmp_path, kind) as kv:
            assert assert_as_cold(kv, tokens) == found
            assert kv.prefix_cache.counts.disk_tokens == found
    with attached(tmp_path, kind) as kv:  # some of it in memory by then
        for tokens, found in [*reversed(asked), *asked]:
            assert assert_as_cold(kv, tokens) == found
            kv.check()


def test_a_state_inside_a_page_that_gave_way_is_found_on_disk(tmp_path: Path) -> None:
    """Its pages are still in memory."""
    kv = attached(tmp_path, HYBRID)
    tokens = models.prompt(40)
    store(kv, tokens[:18])
    kv.prefix_cache.index._state_limit = kv.prefix_cache.index._state_bytes
    store(kv, tokens)
    kv.prefix_cache._disk.store.flush()
    assert kv.prefix_cache.fetch(tokens[:20])[1] == tokens[18:20]
    assert kv.prefix_cache.counts.disk_tokens == 2
    assert assert_as_cold(kv, tokens[:20]) == 18


@pytest.mark.parametrize("kind", [WINDOW, HYBRID, RECURRENT])
def test_any_prompts_after_a_restart_are_as_if_run_cold(tmp_path: Path, kind: str) -> None:
    rng = random.Random(7)
    trunk, branch = models.prompt(50), models.prompt(10, 1)

    def some_prompt() -> list[int]:
        return trunk[: rng.randrange(10, 50)] + branch[: rng.randrange(10)]

    reused = 0
    for _ in range(3):
        with attached(tmp_path, kind, rewind=4, prefix_disk=300_000) as kv:
            for tokens in (some_prompt(), trunk[: rng.randrange(1, 40)]):
                reused += assert_as_cold(kv, some_prompt())
                store(kv, tokens)
    assert reused > 40


def test_what_gave_way_comes_back(tmp_path: Path) -> None:
    kv = attached(tmp_path, max_pages=12)
    prompts = [models.prompt(24, seed) for seed in range(6)]
    for tokens in prompts:
        store(kv, tokens)
    assert kv.stats().evictions > 20
    for tokens in prompts:
        kv.prefix_cache._disk.store.flush()  # what gave way last
        cache, rest = kv.prefix_cache.fetch([*tokens, 1])
        assert rest == [1]
        cold = kv.make_cache()
        got = models.logits(kv.model, rest, cache)[-1]
        del cache
        assert models.largest_difference(got, models.logits(kv.model, [*tokens, 1], cold)[-1]) < 1e-4
        del cold
        kv.check()
    assert kv.prefix_cache.counts.disk_tokens >= 4 * 24


def test_what_is_in_use_is_not_pushed_out_to_load_more(tmp_path: Path) -> None:
    tokens, other = models.prompt(40), models.prompt(24, 1)
    with attached(tmp_path) as kv:
        store(kv, tokens)
    kv = attached(tmp_path, max_pages=12)
    running = run(kv, other)
    assert kv.prefix_cache.fetch([*tokens, 1])[1] == [*tokens, 1]
    assert kv.prefix_cache.counts.refused == {"it is on disk, and could not be loaded or had no room": 40}
    kv.check()
    assert running[0].offset == 24
    del running
    assert kv.prefix_cache.fetch([*tokens, 1])[1] == [1]


def test_other_formats_and_weights_do_not_find_it(tmp_path: Path) -> None:
    tokens = models.prompt(40)
    with attached(tmp_path) as kv:
        store(kv, tokens)
    for kv in (
        attached(tmp_path, page_size=8),
        tinykv.attach(models.shared(FULL, seed=9), page_size=4, prefix_dir=str(tmp_path)),
        attached(tmp_path, WINDOW),
    ):
        assert assert_as_cold(kv, [*tokens, 1]) == 0
        kv.detach()


@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "empty", "foreign"])
def test_a_damaged_file_is_not_used(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    tokens = models.prompt(24)
    with attached(tmp_path) as kv:
        store(kv, tokens)
    for path in files(tmp_path):
        data = path.read_bytes()
        middle = len(data) // 2
        new = {
            "cut": data[:-7],
            "flip": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
            "empty": b"",
            "foreign": b"something else",
        }
        path.unlink() if damage == "gone" else path.write_bytes(new[damage])
    kv = attached(tmp_path)
    assert assert_as_cold(kv, [*tokens, 1]) == 0
    assert ("checksum" in caplog.text) == (damage != "gone")
    kv.prefix_cache._disk.store.flush()
    assert len(files(tmp_path)) < 6
    # And it can be stored again.
    store(kv, tokens)
    kv.prefix_cache.flush()
    kv.prefix_cache.clear()
    assert assert_as_cold(kv, [*tokens, 1]) == 24


def test_the_limit_holds_and_the_oldest_go_first(tmp_path: Path) -> None:
    kv = attached(tmp_path)
    page = kv.groups[0].page_bytes
    kv.detach()
    limit = 20 * (page + 2000)
    prompts = [models.prompt(16, seed) for seed in range(12)]
    for tokens in prompts:
        with attached(tmp_path, prefix_disk=limit) as kv:
            store(kv, tokens)
            if tokens == prompts[3]:
                kv.prefix_cache.fetch([*prompts[0], 1])  # used again
    assert sum(path.stat().st_size for path in files(tmp_path)) <= limit
    with attached(tmp_path) as kv:
        found = [kv.prefix_cache.matched([*tokens, 1]) for tokens in prompts]
    assert found[-4:] == [16] * 4
    assert found[1:4] == [0] * 3
    assert found[0] >= found[1]


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    tokens = models.prompt(24)
    first, second = attached(tmp_path), attached(tmp_path)
    store(first, tokens)
    first.prefix_cache.flush()
    assert assert_as_cold(second, [*tokens, 1]) == 24
    for path in files(tmp_path):
        path.unlink()  # as another process does that keeps its limit
    second.prefix_cache.clear()
    assert assert_as_cold(second, [*tokens, 1]) == 0


WRITER = """
import random, sys, time
import mlx.core as mx
from tinykv_plugin.prefix_store import PrefixStore
from tinykv_plugin.serving.prompt_cache import PagedPromptCache
from tinykv_plugin.prefix_tree import page_hash, token_bytes
store = PrefixStore(sys.argv[1], 200_000)
rng = random.Random(int(sys.argv[2]))
print("ready", flush=True)
while True:
    tokens = token_bytes([rng.randrange(50)] * 4)
    array = mx.full((1, 1, 4, 64), float(tokens[0]))
    key = page_hash(b"salt", tokens)
    store.save(key, tokens, 0, [True], lambda: {"0.keys": array, "0.values": array}, None, time.time(), wait=True)
    found = store.find(key, tokens)
    if found is not None:
        store.load(found)
"""


def test_killed_at_any_moment_it_stays_usable(tmp_path: Path) -> None:
    """Two writers on one folder, killed again and again: every entry that is left is whole."""
    rng = random.Random(5)
    for turn in range(4):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, str(tmp_path), str(2 * turn + number)], stdout=subprocess.PIPE, text=True
            )
            for number in range(2)
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.05, 0.4))
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()
    store = PrefixStore(tmp_path, 200_000)
    with contextlib.closing(sqlite3.connect(store._folder / "index.sqlite")) as db:
        rows = db.execute("SELECT hash, tokens, bytes FROM pages").fetchall()
    assert len(rows) > 10
    assert sum(size for *_, size in rows) <= 200_000 + 5000
    for key, tokens, _ in rows:
        found = store.find(key, tokens)
        assert found is not None
        arrays = store.load(found)
        assert arrays is not None
        assert (arrays["0.keys"] == float(tokens[0])).all()
    store.close()


def test_a_folder_that_goes_away_costs_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kv = attached(tmp_path / "pages", max_pages=16)
    store(kv, models.prompt(24))
    for path in sorted((tmp_path / "pages").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    for seed in range(1, 4):
        store(kv, models.prompt(24, seed))
        assert assert_as_cold(kv, [*models.prompt(20, seed), 1]) == 20
    kv.prefix_cache._disk.store.flush()
    assert "was not stored" in caplog.text


def test_a_folder_that_cant_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"prefix_dir: '.*file' can't be used: .*a writable folder will"):
        attached(tmp_path / "file").make_cache()
    with pytest.raises(ConfigError, match=r"prefix_disk: .*many.* is not allowed: it must be a size such as 4GiB"):
        attached(tmp_path, prefix_disk="many")
    with pytest.raises(ConfigError, match="prefix_disk: 0 is not allowed"):
        attached(tmp_path, prefix_disk=0)


def test_a_damaged_state_is_not_used(tmp_path: Path) -> None:
    tokens = models.prompt(20)
    with attached(tmp_path, HYBRID) as kv:
        store(kv, tokens)
    states = [path for path in files(tmp_path) if ".state." in path.name]
    assert states
    for path in states:
        data = path.read_bytes()
        path.write_bytes(data[:-4] + bytes([data[-4] ^ 64]) + data[-3:])
    assert assert_as_cold(attached(tmp_path, HYBRID), [*tokens, 1]) == 0


def test_a_damaged_index_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = models.prompt(20)
    with attached(tmp_path) as kv:
        store(kv, tokens)
    (index,) = tmp_path.rglob("index.sqlite")
    index.write_bytes(b"no database at all, but long enough to be looked at as if it were one" * 40)
    kv = attached(tmp_path)
    assert assert_as_cold(kv, [*tokens, 1]) == 0
    assert "set aside" in caplog.text
    store(kv, tokens)
    kv.detach()
    kv = attached(tmp_path)
    assert assert_as_cold(kv, [*tokens, 1]) == 20


@pytest.mark.parametrize(("gone", "left"), [(FULL, (0, 0)), (WINDOW, (23, 0))])
def test_a_prompt_whose_files_are_gone_is_run(tmp_path: Path, gone: str, left: tuple[int, int]) -> None:
    """Also by a draft model alone, but it needs no more than its model has."""
    tokens = models.prompt(24)
    for kind in (FULL, WINDOW):
        with attached(tmp_path / kind, kind) as kv:
            store(kv, tokens)
    for path in files(tmp_path / gone):
        path.unlink()
    stored = PagedPromptCache()
    stored.use([attached(tmp_path / kind, kind).prefix_cache for kind in (FULL, WINDOW)])
    found, rest = stored.fetch_nearest_cache("model", tokens)
    assert isinstance(found, StoredPrompt)
    assert left[0] - 4 < 24 - len(rest) <= left[0]
    assert [part.count for part in found.parts] == [24 - len(rest), left[1]]


def test_what_is_on_disk_already_is_not_written_with_less(tmp_path: Path) -> None:
    """A prompt that is loaded for its end has lost what its windows had passed."""
    tokens = models.prompt(60)
    with attached(tmp_path, WINDOW, rewind=4) as kv:
        for length in (20, 60):
            store(kv, tokens[:length])
    with attached(tmp_path, WINDOW, rewind=4) as kv:
        assert assert_as_cold(kv, [*tokens, 1]) == 60
    with attached(tmp_path, WINDOW, rewind=4) as kv:
        assert assert_as_cold(kv, [*tokens[:20], 1]) == 20


def test_states_that_gave_way_are_found_on_disk(tmp_path: Path) -> None:
    """A model without pages: what leads to a state is stored with it, though nothing of it is in memory."""
    kv = attached(tmp_path, RECURRENT, prefix_states=0.01)
    prompts = [[seed, *models.prompt(19, seed)] for seed in range(12)]
    for tokens in prompts:
        store(kv, tokens)
        kv.prefix_cache._disk.store.flush()
    assert len(kv.prefix_cache) < 12
    for tokens in prompts:
        assert assert_as_cold(kv, [*tokens, 1]) == 20


def test_a_locked_index_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_index, "PATIENCE", 0.5)
    monkeypatch.setattr(page_writer, "PATIENCE", 0.5)
    kv = attached(tmp_path)
    store(kv, models.prompt(80))
    (path,) = tmp_path.rglob("index.sqlite")
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        start = time.monotonic()
        kv.prefix_cache.flush()
        assert time.monotonic() - start < 20 * 0.5
        other.rollback()
    kv.prefix_cache.flush()
    kv.detach()
    assert assert_as_cold(attached(tmp_path), [*models.prompt(80), 1]) == 80


def test_a_page_is_not_written_again_with_less(tmp_path: Path) -> None:
    """Two jobs for one page wait: the first has the states, the second comes from a time when they had given way."""
    store = PrefixStore(tmp_path, 1 << 20)
    tokens = token_bytes([1, 2, 3, 4])
    key = page_hash(b"salt", tokens)
    state = mlx_cache.ArraysCache(1)
    state[0] = mx.ones((1, 4))
    release = threading.Event()
    store._submit(lambda index: release.wait())
    for groups, states in (([True, False], [state]), ([True, True], None)):
        arrays = {"0.keys": mx.ones((1, 1, 4, 8)), "0.values": mx.ones((1, 1, 4, 8))}
        store.save(key, tokens, 0, groups, lambda arrays=arrays: arrays, states, time.time())
    release.set()
    store.flush()
    found = store.find(key, tokens)
    assert found is not None
    assert found.has_all([True, True], True)
    assert store.load_state(found)[0][0].sum().item() == 4
    store.close()


@pytest.fixture(params=[OSError(errno.ENOSPC, "No space left on device"), RuntimeError("[write] Unable to write 9")])
def full_disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Page files that fit on the disk of ``tmp_path``, one number in a list."""
    room, write = [0], mx.save_safetensors

    def save(path: str, arrays: Any, *args: Any) -> None:
        if len([file for file in files(tmp_path) if file != Path(path)]) >= room[0]:
            Path(path).write_bytes(b"the beginning")
            raise request.param
        write(path, arrays, *args)

    monkeypatch.setattr(prefix_store.mx, "save_safetensors", save)
    usage = prefix_store.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(prefix_store.shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    return room


def test_a_full_disk_has_the_beginnings(tmp_path: Path, full_disk: list[int], caplog: pytest.LogCaptureFixture) -> None:
    full_disk[0] = 6
    tokens = models.prompt(40)
    with attached(tmp_path) as kv:
        store(kv, tokens)
    assert caplog.text.count("was not stored") == 1
    assert len(files(tmp_path)) == 6
    with attached(tmp_path) as kv:
        assert assert_as_cold(kv, [*tokens, 1]) == 24


def test_on_a_full_disk_the_oldest_give_way(tmp_path: Path, full_disk: list[int]) -> None:
    full_disk[0] = 6
    old, new, newest = (models.prompt(16, seed) for seed in range(3))
    for tokens in (old, new):
        with attached(tmp_path) as kv:
            store(kv, tokens)
    with attached(tmp_path) as kv:
        assert [kv.prefix_cache.matched([*tokens, 1]) for tokens in (old, new)] == [8, 16]
        for tokens in (newest, old):
            store(kv, tokens)
        assert assert_as_cold(kv, [*newest, 1]) == 16  # used last
    with attached(tmp_path) as kv:
        assert [kv.prefix_cache.matched([*tokens, 1]) for tokens in (newest, old, new)] == [16, 8, 0]


def test_requests_go_on_with_a_full_disk(
    tmp_path: Path, full_disk: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with attached(tmp_path, max_pages=20) as kv:
        for seed in range(5):
            store(kv, models.prompt(24, seed))
            assert assert_as_cold(kv, [*models.prompt(24, seed), 1]) == 24
    assert full_disk == [0]
    assert caplog.text.count("was not stored") == 1
    assert files(tmp_path) == []


@pytest.mark.parametrize("kind", [FULL, HYBRID])
def test_writing_old_prompts_displaces_no_newer_ones(tmp_path: Path, kind: str) -> None:
    """What is in memory when a model is detached may be older than what another process has stored."""
    old, new = models.prompt(40), models.prompt(40, 1)
    with attached(tmp_path / "size", kind) as kv:
        store(kv, new)
    limit = sum(path.stat().st_size for path in files(tmp_path / "size")) + 100
    first = attached(tmp_path / "pages", kind, prefix_disk=limit)
    store(first, old)
    # Weights of its own, which are equal: a model can be attached to once.
    second = tinykv.attach(models.make(kind), page_size=4, memory="4MiB", prefix_dir=str(tmp_path / "pages"))
    store(second, new)
    second.detach()
    first.detach()
    assert sum(path.stat().st_size for path in files(tmp_path / "pages")) <= limit
    with attached(tmp_path / "pages", kind) as kv:
        assert kv.prefix_cache.matched([*new, 1]) == 40
        assert kv.prefix_cache.matched([*old, 1]) == 0
