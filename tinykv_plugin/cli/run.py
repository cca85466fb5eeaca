"""``tinykv run``: a user's own program, with every model it loads through mlx-lm attached."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import KVCacheConfig
from .console import console, log_to_stderr
from .failures import UsageError
from .flags import flags_help, take_kv_flags
from .forward import check_plugins
from .models import AttachedModels
from .patches import arguments
from .prompt_files import paged_prompt_files
from .stats import print_reports

HELP = """\
usage: tinykv run [--kv-...] [--] script.py [argument ...]
       tinykv run [--kv-...] -m module [argument ...]

Run a Python program; the models it loads through mlx-lm get paged caches.

"""


@dataclass(frozen=True)
class Program:
    """What to run: the path of a script (or folder, or zip file, with a ``__main__``), or a module's name."""

    target: str
    is_module: bool
    arguments: Sequence[str]


def run(argv: Sequence[str]) -> int:
    """Run a program as ``__main__``, as ``python`` would. Its SystemExit and its exceptions pass through."""
    fields, rest = take_kv_flags(argv, leading=True)
    if rest[:1] in (["-h"], ["--help"]):
        print(HELP + flags_help(), end="")
        return 0
    program = parse_program(rest)
    config = KVCacheConfig(**fields)
    with log_to_stderr(verbose=config.verbose):
        check_plugins(config)
        with AttachedModels(config) as models, paged_prompt_files(models):
            try:
                execute(program)
            finally:
                if config.stats:
                    print_reports(console(stderr=True), models.reports())
    return 0


def parse_program(argv: Sequence[str]) -> Program:
    """What ``argv``, the rest after our flags, asks to run. Raises UsageError."""
    rest = list(argv[1:] if argv[:1] == ["--"] else argv)
    is_module = rest[:1] == ["-m"]
    if is_module:
        rest.pop(0)
    if not rest:
        what = "a module after -m" if is_module else "a script or -m module"
        raise UsageError(f"run needs {what}; see tinykv run --help")
    target, *following = rest
    if target.startswith("-"):
        raise UsageError(f"run: {target} is not known; the program's own arguments come after the program")
    if not is_module and not os.path.exists(target):
        raise UsageError(f"run: there is no file {target}")
    return Program(target, is_module, following)


def execute(program: Program) -> None:
    """Run the program with ``sys.argv`` and ``sys.path[0]`` as ``python`` sets them. Raises UsageError."""
    with arguments([program.target, *program.arguments], first_path=_first_path(program)):
        if program.is_module:
            _require_module(program.target)
            runpy.run_module(program.target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program.target, run_name="__main__")


def _require_module(name: str) -> None:
    """Raise UsageError if there is no such module. Imports the packages it is in, as running it does."""
    try:
        found = importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError) as error:
        # What a package it is in lacks is another matter.
        if isinstance(error, ModuleNotFoundError) and not f"{name}.".startswith(f"{error.name}."):
            raise
        found = False
    if not found:
        raise UsageError(f"run: there is no module {name}")


def _first_path(program: Program) -> str | None:
    """What ``python`` puts first in ``sys.path``; None if it was told to put nothing there (``python -P``)."""
    if getattr(sys.flags, "safe_path", False):
        return None
    if program.is_module:
        return os.getcwd()
    if os.path.isdir(program.target) or zipfile.is_zipfile(program.target):
        return program.target
    return os.path.dirname(os.path.realpath(program.target))
