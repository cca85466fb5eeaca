"""A release: the same bytes whoever builds it, and a place to stand on for other people's projects."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from install_native import compiler

from conftest import ROOT, run

# A user's own project: a provider of its own, and a program that uses it beside the built-in one.
PYPROJECT = """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "my-project"
version = "0.1"
dependencies = ["tinykv-plugin"]

[project.entry-points.tinykv_plugin]
mine = "my_project"
"""

PROVIDER = """\
from tinykv_plugin import hookimpl
from tinykv_plugin.protocols import LayerPlan
from tinykv_plugin.stats import PoolStats


class Session:
    def __init__(self, context):
        self.context = context
        self.made = 0
        self.plan = [LayerPlan(0, "dense", "dense", "mine", "my own")]

    def make_cache(self, max_kv_size=None):
        self.made += 1
        return self.context.own_cache()

    def stats(self):
        return PoolStats(sequences=self.made)

    def check(self):
        pass

    def close(self):
        pass


class Provider:
    name = "mine"

    def open(self, context):
        return Session(context)


@hookimpl
def tinykv_providers():
    return [Provider()]
"""

PROGRAM = """\
from tinykv_plugin.blas import load_blas

load_blas()

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models import llama

import tinykv_plugin as tinykv

model = llama.Model(llama.ModelArgs(
    model_type="llama", hidden_size=32, num_hidden_layers=2, intermediate_size=64, num_attention_heads=4,
    num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=50,
))


def tokens():
    return [int(token) for token, _ in generate_step(mx.array([1, 2, 3]), model, max_tokens=8)]


stock = tokens()
with tinykv.attach(model, page_size=4) as kv:
    assert tokens() == stock
    assert kv.stats().peak_pages_used == 3, kv.stats()
with tinykv.attach(model, cache="mine") as kv:
    assert tokens() == stock
    assert (kv.stats().sequences, kv.plan[0].reason) == (1, "my own")
print("both work")
"""


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def build_twice(folder: Path, tmp_path: Path) -> list[dict[str, str]]:
    """As two people would build it: in other folders, at other times, with other rights on the files.

    A wheel is made from the source distribution, as ``build`` does by default: the rights of files are the same there.
    """
    listed = subprocess.run(["git", "ls-files"], cwd=folder, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout, so what belongs to the source can't be told")
    results = []
    for number, (rights, stamp) in enumerate(((0o644, 1_600_000_000), (0o664, 1_700_000_000))):
        place = tmp_path / f"copy{number}" / "source"
        for name in listed.stdout.splitlines():
            source, target = folder / name, place / name
            if not source.is_file():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            target.chmod(rights | (0o111 if os.access(source, os.X_OK) else 0))
            os.utime(target, (stamp, stamp))
        out = tmp_path / f"out{number}"
        environment = {**os.environ, "SOURCE_DATE_EPOCH": "1580601600"}
        run(sys.executable, "-m", "build", "--outdir", out, place, env=environment)
        results.append(digests(out))
    return results


def test_two_builds_are_the_same_bytes(tmp_path: Path) -> None:
    first, second = build_twice(ROOT, tmp_path)
    assert len(first) == 2
    assert first == second


@pytest.mark.timeout(900)
def test_two_builds_of_the_native_backend_are_the_same_bytes(tmp_path: Path) -> None:
    if compiler() is None:
        pytest.skip("there is no C++ compiler, which tinykv-native needs")
    first, second = build_twice(ROOT / "native", tmp_path)
    assert len(first) == 2
    assert first == second


def test_a_users_project_stands_next_to_ours(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "pyproject.toml").write_text(PYPROJECT, encoding="utf-8")
    (tmp_path / "project" / "my_project.py").write_text(PROVIDER, encoding="utf-8")
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    pip = (installed / "python", "-m", "pip", "--disable-pip-version-check", "--quiet")
    run(*pip, "install", tmp_path / "project", ROOT / "tests" / "example_plugin")
    try:
        assert run(installed / "python", "program.py", cwd=tmp_path) == "both work\n"
        output = run(installed / "tinykv", "plugins", cwd=tmp_path)
        for name, distribution in (("mine", "my-project"), ("example", "tinykv-example"), ("paged", "tinykv-plugin")):
            assert any(name in line and distribution in line for line in output.splitlines()), output
        assert "No broken requirements found" in run(*pip[:3], "check")
    finally:
        run(*pip, "uninstall", "--yes", "my-project", "tinykv-example")
    assert "my-project" not in run(installed / "tinykv", "plugins", cwd=tmp_path)


def test_the_quick_start_works_from_the_wheel_alone(installed: Path, tmp_path: Path) -> None:
    """The first answers of docs/quick-start.md, by the model that ``tinykv demo`` fetches."""
    output = run(installed / "tinykv", "demo", "--max-tokens", "4", cwd=tmp_path)
    assert "the tokens of all 7 prompts are equal" in output, output
    fetched = "from tinykv_plugin.demo.fetch import fetch_model; print(fetch_model(progress=False))"
    model = run(installed / "python", "-c", fetched, cwd=tmp_path).strip()
    command = [installed / "tinykv", "generate", "--model", model, "--prompt", "Why is the sky blue?"]
    done = subprocess.run(
        [*map(str, command), "--max-tokens", "4", "--kv-stats"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "==========" in done.stdout, done.stdout
    assert "bytes" in done.stderr.partition("KV pages of")[2], done.stderr
    output = run(
        installed / "tinykv", "inspect", f"{model}/config.json", "--memory", "36GiB", "--context", "2k", cwd=tmp_path
    )
    assert "--kv-memory" in output, output


def test_shell_completion_comes_with_it(installed: Path, tmp_path: Path) -> None:
    assert "complete -o default -F _tinykv tinykv" in run(installed / "tinykv", "completion", "bash", cwd=tmp_path)
