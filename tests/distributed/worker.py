"""One of the processes of a divided model: generates and prints what it found as a line of JSON.

``worker.py MODEL tensor|pipeline|whole [MEMORY …]``, a memory limit for each rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tinykv_plugin.blas import load_blas

load_blas()
sys.path.insert(0, str(Path(__file__).parents[1] / "archs"))

import mlx.core as mx  # noqa: E402
import oracle  # noqa: E402
from tiny import registry  # noqa: E402

import tinykv_plugin as tinykv  # noqa: E402
from tinykv_plugin.batching.generator import PagedBatchGenerator  # noqa: E402
from tinykv_plugin.cli.launched import share_randomness  # noqa: E402
from tinykv_plugin.errors import TinyKVError  # noqa: E402


def main(name: str, how: str, *memory: str) -> None:
    group = mx.distributed.init()
    if how == "random":
        mx.random.seed(group.rank())
        own = mx.random.uniform().item()
        share_randomness(group)
        print(json.dumps({"rank": group.rank(), "own": own, "shared": mx.random.uniform().item()}), flush=True)
        return
    # Four layers, so that two processes have each kind.
    model = registry.make(name, **({"num_hidden_layers": 4} if name != "ministral3" else {}))
    if how == "tensor":
        model.shard(group)
    elif how == "pipeline":
        model.model.pipeline(group)
    mx.eval(model.parameters())
    limit: dict[str, Any] = {"memory": memory[group.rank()]} if memory else {}
    with tinykv.attach(model, attention="gather", page_size=4, **limit) as kv:
        found: dict[str, Any] = {"rank": group.rank(), "events": []}
        found["single"] = attempt(lambda: oracle.run(model, oracle.PROMPTS[0], kv.make_cache(), 12).tokens)
        found["long"] = attempt(lambda: oracle.run(model, oracle.prompt(60), kv.make_cache(), 4).tokens)
        found["batch"] = attempt(lambda: [one.tokens for one in oracle.staggered(PagedBatchGenerator, model)])
        kv.check()
        stats = kv.stats()
        found |= {"peak": stats.peak_pages_used, "bytes": stats.peak_bytes_reserved, "used": stats.pages_used}
        found["groups"] = [group.name for group in kv.groups]
    print(json.dumps(found), flush=True)


def attempt(work: Any) -> Any:
    try:
        return work()
    except TinyKVError as error:
        return type(error).__name__


main(*sys.argv[1:])
