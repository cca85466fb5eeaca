"""The entry of the command ``tinykv``: finds the command, and turns errors into one line and an exit code."""

from __future__ import annotations

import importlib.util
import os
import select
import sys
from collections.abc import Callable, Sequence
from typing import cast

from ..blas import load_blas
from ..errors import TinyKVError
from ..mlx_lm_installation import not_installed
from .console import log_to_stderr
from .failures import BROKEN_PIPE, INTERRUPTED, CommandError, UsageError, did_you_mean, exit_code
from .flags import flags_help
from .mlx_lm_commands import mlx_lm_commands

OWN_COMMANDS = {
    "run": "run your own Python program with paged caches",
    "demo": "fetch a small model and run it dense and paged, side by side",
    "bench": "measure stock mlx-lm and paged caches on this machine",
    "inspect": "show how a model's layers are served and what fits the budget",
    "plugins": "list the installed plugins",
    "selftest": "compare and time attention backends on this device",
    "top": "show what a running tinykv server is doing",
    "completion": "print a completion script for bash, zsh or fish",
}

NEED_MLX_LM = frozenset({"run", "demo", "bench", "inspect", "selftest"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``tinykv`` with ``argv`` (default: the process's arguments) and return its exit code."""
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except TinyKVError as error:
        print(f"tinykv: error: {error}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            return exit_.code or 0
        raise
    except BrokenPipeError:
        if not _silence_broken_stdout():
            raise
        return BROKEN_PIPE
    return code


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(help_text(), end="")
        return 0
    load_blas()
    name, *rest = argv
    if name == "--version":
        from .version import version_lines

        with log_to_stderr(verbose=False):
            print("\n".join(version_lines()))
        return 0
    return _command(name)(rest)


def _command(name: str) -> Callable[[Sequence[str]], int]:
    """The function that runs command ``name`` with its arguments. Raises UsageError; CommandError without mlx-lm."""
    if name in NEED_MLX_LM and importlib.util.find_spec("mlx_lm") is None:
        raise CommandError(not_installed())
    if name in OWN_COMMANDS:
        module = importlib.import_module(f".{name}", __package__)
        return cast("Callable[[Sequence[str]], int]", getattr(module, name))
    commands = mlx_lm_commands()
    if name in commands:
        from .forward import forward

        return lambda argv: forward(commands[name], argv)
    if name.startswith("-"):
        raise UsageError(f"{name}: the command comes first, then its options (tinykv --help lists the commands)")
    hint = did_you_mean(name, [*OWN_COMMANDS, *commands])
    raise UsageError(f"there is no command {name}{hint} (tinykv --help lists the commands)")


def _silence_broken_stdout() -> bool:
    """If nobody reads standard output any more: True, and what is still in its buffer goes nowhere, quietly."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return False
    # The buffer may be empty again after a failed write: flushing doesn't tell.
    poll = select.poll()
    poll.register(descriptor, 0)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return True


def help_text() -> str:
    """What ``tinykv --help`` prints."""
    commands = mlx_lm_commands().values()
    paged = ", ".join(command.name for command in commands if command.keeps_kv)
    others = ", ".join(command.name for command in commands if not command.keeps_kv)
    lines = ["usage: tinykv COMMAND [--kv-...] [arguments of the command]", "       tinykv --version", ""]
    lines += ["mlx-lm with its KV cache in pages.", ""]
    lines += ["commands of mlx-lm, with paged caches:", f"  {paged}", ""]
    lines += ["commands of mlx-lm, as they are:", f"  {others}", ""]
    lines += ["commands of tinykv:", *(f"  {name:<12}{text}" for name, text in OWN_COMMANDS.items()), ""]
    lines += ["tinykv COMMAND --help shows what a command takes.", "", flags_help()]
    return "\n".join(lines)
