"""``tinykv completion``: the scripts do what they say, and know every option there is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinykv_plugin.cli.completion import OWN_OPTIONS, SHELLS, WITHOUT_KV_FLAGS, words_by_command
from tinykv_plugin.cli.main import OWN_COMMANDS
from tinykv_plugin.cli.mlx_lm_commands import mlx_lm_commands

Call = Callable[..., Any]


def completed(script: str, *words: str) -> list[str]:
    """What bash offers for the last of ``words``."""
    line = f"COMP_WORDS=({' '.join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}; _tinykv"
    command = script + f'{line}; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_and_flags(tinykv: Call) -> None:
    script = tinykv("completion", "bash").out
    assert {"generate", "server", "inspect", "top", "bench"} <= set(completed(script, "tinykv", ""))
    assert completed(script, "tinykv", "insp") == ["inspect"]
    assert completed(script, "tinykv", "generate", "--kv-pag") == ["--kv-page-size"]
    assert completed(script, "tinykv", "inspect", "m", "--conc") == ["--concurrency"]
    assert completed(script, "tinykv", "generate", "--max-tok") == ["--max-tokens"]
    assert completed(script, "tinykv", "convert", "--kv-") == []
    assert completed(script, "tinykv", "convert", "--q-b") == ["--q-bits"]
    assert completed(script, "tinykv", "top", "--kv-") == []
    assert completed(script, "tinykv", "completion", "z") == ["zsh"]


@pytest.mark.parametrize("name", sorted(OWN_COMMANDS))
def test_every_option_is_known(tinykv: Call, name: str) -> None:
    help_text = tinykv(name, "--help").out.partition("paged KV cache:")[0]
    options = set(re.findall(r"(?<!\w)--[a-z][\w-]*", help_text)) - {"--help"}
    options = {option for option in options if not option.startswith(("--kv-", "--no-kv-"))}
    assert options == {option for option in OWN_OPTIONS[name] if option.startswith("--")}
    assert ("paged KV cache:" in tinykv(name, "--help").out) == (name not in WITHOUT_KV_FLAGS)


@pytest.mark.parametrize("name", ["generate", "server", "chat", "convert"])
def test_mlx_lms_own_options_are_read_from_its_source(tinykv: Call, name: str) -> None:
    help_text = tinykv(name, "--help").out.partition("paged KV cache:")[0]
    options = set(re.findall(r"^  (?:-\w(?: \S+)?, )?(--[a-z][\w-]*)", help_text, re.MULTILINE)) - {"--help"}
    assert options
    assert options == set(mlx_lm_commands()[name].options())


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(tinykv: Call, tmp_path: Path) -> None:
    (tmp_path / "tinykv.fish").write_text(tinykv("completion", "fish").out, encoding="utf-8")
    command = f"source {tmp_path}/tinykv.fish; complete -C 'tinykv insp'; complete -C 'tinykv generate --kv-pag'"
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    done = subprocess.run(["fish", "-c", command], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["inspect", "--kv-page-size"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_takes_it(tinykv: Call, tmp_path: Path) -> None:
    (tmp_path / "tinykv.zsh").write_text(tinykv("completion", "zsh").out, encoding="utf-8")
    command = f"autoload -Uz compinit; compinit -D -u; source {tmp_path}/tinykv.zsh; print $_comps[tinykv]"
    done = subprocess.run(["zsh", "-f", "-c", command], capture_output=True, text=True, check=True)
    assert "_tinykv" in done.stdout


def test_the_other_shells(tinykv: Call) -> None:
    assert tinykv("completion", "zsh").out.startswith("autoload -U +X bashcompinit && bashcompinit\n_tinykv() {")
    fish = tinykv("completion", "fish").out
    assert "complete -c tinykv -n '__fish_seen_subcommand_from top' -l url\n" in fish
    assert fish.count("\n") == 1 + sum(map(len, words_by_command().values()))


def test_another_shell_is_refused(tinykv: Call) -> None:
    done = tinykv("completion", "tcsh")
    assert done.code == 2
    assert all(shell in done.err for shell in SHELLS)
