"""mlx-lm's own subcommands, read from its metadata without importing it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution
from pathlib import Path

from ..mlx_lm_installation import not_installed
from .failures import CommandError

WITHOUT_KV_CACHE = frozenset(
    {"awq", "convert", "dwq", "dynamic_quant", "fuse", "gptq", "lora", "manage", "perplexity", "share", "upload"}
)
"""Commands that keep no K/V from one model call to the next: forwarded, with nothing attached."""

WITH_MAX_KV_SIZE = frozenset({"cache_prompt", "chat", "generate"})
"""Commands that have the flag ``--max-kv-size``."""


WITH_QUANTIZED_START = frozenset({"cache_prompt", "generate", "server"})
"""Commands that have the flag ``--quantized-kv-start``."""

_LONG_OPTION = re.compile(r"""add_argument\(\s*(?:["']-\w["'],\s*)?["'](--[a-z][\w-]*)["']""")


@dataclass(frozen=True)
class MlxLmCommand:
    """One subcommand, e.g. ``generate``, and where its ``main`` is."""

    name: str
    entry: EntryPoint

    @property
    def keeps_kv(self) -> bool:
        """Whether the command keeps K/V between two calls of the model."""
        return self.name not in WITHOUT_KV_CACHE

    def options(self) -> Sequence[str]:
        """Its long options, read from its source: importing it takes longer than a shell may need to start."""
        package, *inner = self.entry.module.split(".")
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            file = Path(folder, *inner).with_suffix(".py")
            if file.is_file():
                return tuple(dict.fromkeys(_LONG_OPTION.findall(file.read_text(encoding="utf-8"))))
        return ()

    def load(self) -> object:
        """Import the command and return its ``main``. Raises CommandError if a package that it uses is absent."""
        try:
            return self.entry.load()
        except ModuleNotFoundError as error:
            raise CommandError(
                f"mlx-lm's {self.name} can't be imported: {error.msg}; install what it needs ({_hint(self.name)})"
            ) from error


def _hint(command: str) -> str:
    """How to install what a command needs: mlx-lm names its extras after its commands, or after none."""
    extras = distribution("mlx-lm").metadata.get_all("Provides-Extra") or ()
    return f"pip install 'mlx-lm[{command}]'" if command in extras else "see mlx-lm's documentation"


def mlx_lm_commands() -> Mapping[str, MlxLmCommand]:
    """The subcommands of the installed mlx-lm, by name. Raises CommandError if it isn't installed."""
    try:
        points = distribution("mlx-lm").entry_points.select(group="console_scripts")
    except PackageNotFoundError:
        raise CommandError(not_installed()) from None
    found = sorted((point for point in points if point.name.startswith("mlx_lm.")), key=lambda point: point.name)
    names = [(point.name.removeprefix("mlx_lm."), point) for point in found]
    return {name: MlxLmCommand(name, point) for name, point in names}
