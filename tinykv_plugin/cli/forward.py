"""``tinykv generate``, ``chat``, ``server`` …: a command of mlx-lm with paged caches and otherwise as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from ..config import KVCacheConfig
from .console import console, log_to_stderr
from .failures import UsageError
from .flags import MLX_LM_FIELDS, PREFIX, flags_help, take_kv_flags
from .launched import divided
from .missing_models import told_in_one_line
from .mlx_lm_commands import WITH_MAX_KV_SIZE, WITH_QUANTIZED_START, MlxLmCommand
from .models import DENSE, AttachedModels
from .patches import arguments
from .prompt_files import paged_prompt_files
from .stats import print_reports
from .stored_prompts import stored_prompts

MAX_KV_SIZE = "--max-kv-size"
SHORTEST_MAX_KV_SIZE = "--max-k"
QUANTIZED_START = "--quantized-kv-start"
SHORTEST_QUANTIZED_START = "--q"


def forward(command: MlxLmCommand, argv: Sequence[str]) -> int:
    """Run mlx-lm's ``command`` with ``argv`` (without its name). SystemExit of its argument parser passes through."""
    fields, rest = take_kv_flags(argv)
    if not command.keeps_kv:
        if fields:
            raise UsageError(f"{command.name} uses no KV cache, so it takes no --kv- flags")
        _call(command, rest)
        return 0
    if asks_for_help(rest):
        return _help(command, rest)
    config, rest = configuration(command, fields, rest)
    with log_to_stderr(verbose=config.verbose):
        check_plugins(config)
        with (
            AttachedModels(config) as models,
            paged_prompt_files(models),
            divided(command),
            _prepared(command, config, models),
            # The server has clients to tell.
            told_in_one_line() if command.name != "server" else contextlib.nullcontext(),
        ):
            try:
                _call(command, rest)
            finally:
                if config.stats:
                    print_reports(console(stderr=True), models.reports())
    return 0


def configuration(
    command: MlxLmCommand, fields: Mapping[str, str | bool], rest: list[str]
) -> tuple[KVCacheConfig, list[str]]:
    """The settings, and the arguments for mlx-lm.

    Flags for quantized K/V that mlx-lm has as well are given to it where it makes the caches. mlx-lm's own
    ``--max-kv-size`` and ``--quantized-kv-start`` are flags of ours too, which count if both are given. mlx-lm's
    ``--max-kv-size`` is taken out then: it would be what a cache is asked for.
    """
    shared = {field: fields[field] for field in MLX_LM_FIELDS if field in fields}
    own = {field: value for field, value in fields.items() if field not in shared}
    if shared and KVCacheConfig(**own).cache == DENSE:
        back = ((PREFIX + field.replace("_", "-"), str(value)) for field, value in shared.items())
        fields, rest = own, [*rest, *(part for flag in back for part in flag)]
    config = KVCacheConfig(**fields)
    if config.cache == DENSE:
        return config, rest
    more: dict[str, str] = {}
    if command.name in WITH_MAX_KV_SIZE:
        size, without = take_value(rest, MAX_KV_SIZE, SHORTEST_MAX_KV_SIZE)
        if size is not None and "max_kv_size" in fields:
            rest = without
        elif size is not None:
            more["max_kv_size"] = size
    if command.name in WITH_QUANTIZED_START and "quantized_start" not in fields:
        start, _ = take_value(rest, QUANTIZED_START, SHORTEST_QUANTIZED_START)
        if start is not None:
            more["quantized_start"] = start
    return (KVCacheConfig(**fields, **more) if more else config), rest


def _prepared(
    command: MlxLmCommand, config: KVCacheConfig, models: AttachedModels
) -> contextlib.AbstractContextManager[None]:
    """For the server, our response generator, prompt cache and handler in the place of mlx-lm's.

    For commands that answer prompts, what is stored of them.
    """
    if command.name == "server":
        from ..serving.server import paged_server

        return paged_server(config.max_queue)
    if command.name in ("generate", "chat") and config.cache != DENSE:
        return stored_prompts(models)
    return contextlib.nullcontext()


def check_plugins(config: KVCacheConfig) -> None:
    """Raise now, not when a model is loaded (the server does that in a thread of its own), if a name is not known."""
    from ..manager import default_manager

    manager = default_manager()
    manager.provider(config.cache)
    manager.backends(config.attention)


def asks_for_help(argv: Sequence[str]) -> bool:
    """Whether mlx-lm's parser will print its help for ``argv``, abbreviations included."""
    options = argv[: argv.index("--")] if "--" in argv else argv
    return any(argument == "-h" or (len(argument) >= 3 and "--help".startswith(argument)) for argument in options)


def take_value(argv: Sequence[str], option: str, shortest: str) -> tuple[str | None, list[str]]:
    """The value of one of mlx-lm's options, which argparse lets be shortened, and ``argv`` without it.

    None, and all of ``argv``, if it isn't there or isn't a number, which is mlx-lm's to report.
    """
    found = None
    others: list[str] = []
    remaining = list(argv)
    while remaining:
        argument = remaining.pop(0)
        name, equals, value = argument.partition("=")
        if argument == "--":
            others += [argument, *remaining]
            break
        if not _is_short_for(name, option, shortest):
            others.append(argument)
            continue
        found = value if equals else "".join(remaining[:1])
        if not found.isdecimal():
            return None, list(argv)
        if not equals:
            remaining.pop(0)
    return found, others


def _is_short_for(name: str, option: str, shortest: str) -> bool:
    """Whether argparse takes ``name`` for ``option``, which no other begins like down to ``shortest``."""
    return option.startswith(name) and len(name) >= len(shortest)


def _help(command: MlxLmCommand, argv: Sequence[str]) -> int:
    try:
        _call(command, argv)
    except SystemExit as exit_:
        if exit_.code not in (0, None):
            raise
    print(f"\n{flags_help()}", end="")
    return 0


def _call(command: MlxLmCommand, argv: Sequence[str]) -> None:
    if command.name == "server":
        # mlx-lm keeps ten prompts. In pages, bytes are the limit, unless a number is given.
        argv = ["--prompt-cache-size", str(10**9), *argv]
    main = cast("Callable[[], object]", command.load())
    # argparse shows the base name of the first argument as the program.
    with arguments([f"tinykv {command.name}", *argv]):
        main()
