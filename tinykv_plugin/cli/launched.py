"""``tinykv generate`` under ``mlx.launch``: the model divided between the processes, and one of them writing."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .failures import UsageError
from .patches import replaced

if TYPE_CHECKING:
    from .mlx_lm_commands import MlxLmCommand


@contextlib.contextmanager
def divided(command: MlxLmCommand) -> Iterator[None]:
    """While the block runs, mlx-lm's ``generate`` loads this process's part of the model.

    By tensors, or by layers where the model has no ``shard()``. mlx-lm's other commands do so by themselves.
    """
    from ..distributed import world

    group = world() if command.name == "generate" else None
    if group is None:
        yield
        return
    module: Any = importlib.import_module("mlx_lm.generate")
    utils: Any = importlib.import_module("mlx_lm.utils")

    def load(path: str, *_: Any, adapter_path: str | None = None, **options: Any) -> Any:
        if adapter_path is not None:
            raise UsageError("--adapter-path can't be used under mlx.launch: fuse the adapter into the model first")
        wanted = {name: options[name] for name in ("return_config", "tokenizer_config") if name in options}
        try:
            loaded = utils.sharded_load(path, None, None, **wanted)
        except ValueError as error:
            raise UsageError(f"{path} can't be divided between processes: {error}") from error
        share_randomness(group)
        return loaded

    silent = contextlib.redirect_stdout(io.StringIO()) if group.rank() else contextlib.nullcontext()
    with replaced(module, "load", load), silent:
        yield


def share_randomness(group: Any) -> None:
    """All processes must draw the same tokens: those of the first."""
    import mlx.core as mx

    state: Any = mx.random.state
    mine = state[0] if group.rank() == 0 else mx.zeros_like(state[0])
    key: Any = mx.distributed.all_sum(mine, group=group, stream=mx.cpu).tolist()
    mx.random.seed(key[0] << 32 | key[1])
