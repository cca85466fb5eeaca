"""Matrix products of mlx on a Linux CPU: with its own BLAS, the system's OpenBLAS, and the one of tinykv-native.

    python benchmarks/blas.py [--model PATH] [--prompt 512] [--repeat 5] [--json FILE]

Each runs in a process of its own, as a BLAS can't be taken back, and they take turns. Times are medians. Without
--model the demo model SmolLM2-135M is fetched; its prefill is stock mlx-lm's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from running import model_folder, parse, parser_of, save

from tinykv_plugin.blas import ENVIRONMENT_VARIABLE, load_blas, native_blas, system_openblas

ONE = "--one"
SIZE = 1024


def seconds_of(call: Callable[[], Any], least: int = 3) -> float:
    call()
    times = []
    end = time.perf_counter() + 0.5
    while len(times) < least or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(model_path: str, prompt: int) -> dict[str, Any]:
    """In a process that has its BLAS: GFLOP/s, the largest error of a product, and seconds of a prefill."""
    name = load_blas().name
    import mlx.core as mx
    import numpy as np
    from mlx_lm import load
    from mlx_lm.models.cache import make_prompt_cache

    left, right = (mx.random.normal((SIZE, SIZE), key=mx.random.key(i)) for i in range(2))
    mx.eval(left, right)
    exact = np.array(left).astype(np.float64) @ np.array(right).astype(np.float64)
    error = float(np.abs(np.array(left @ right) - exact).max())
    product = seconds_of(lambda: mx.eval(left @ right))
    model = load(model_path)[0]
    tokens = mx.random.randint(0, 50, (1, prompt), key=mx.random.key(2))
    prefill = seconds_of(lambda: mx.eval(model(tokens, cache=make_prompt_cache(model))), 1)
    return {"BLAS": name, "GFLOP/s": 2 * SIZE**3 / product / 1e9, "error": error, "prefill s": prefill}


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", help="a local model folder")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(ONE, action="store_true", help=argparse.SUPPRESS)
    arguments = parse(parser, argv, prompt=8, repeat=1)
    if arguments.one:
        print(json.dumps(measure(arguments.model, arguments.prompt)))
        return
    folder = model_folder(arguments)
    ways = {"mlx's own": "off"}
    for name, finder in (("the system's OpenBLAS", system_openblas), ("tinykv-native's", native_blas)):
        path = next(finder(), None)
        if path is None:
            print(f"{name}: not found")
        else:
            ways[name] = path
    command = [sys.executable, __file__, ONE, "--model", folder, "--prompt", str(arguments.prompt)]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for _ in range(arguments.repeat):
        for name, value in ways.items():
            environment = os.environ | {ENVIRONMENT_VARIABLE: value}
            answer = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            found[name].append(json.loads(answer.stdout.splitlines()[-1]))
    results: dict[str, Any] = {}
    for name, runs in found.items():
        results[name] = {key: statistics.median(run[key] for run in runs) for key in ("GFLOP/s", "error", "prefill s")}
        got, base = results[name], results["mlx's own"]
        print(
            f"{name}: {got['GFLOP/s']:.1f} GFLOP/s (x{got['GFLOP/s'] / base['GFLOP/s']:.1f}), largest error "
            f"{got['error']:.1e}, prefill of {arguments.prompt} tokens {got['prefill s']:.2f} s "
            f"(x{base['prefill s'] / got['prefill s']:.1f}); {runs[0]['BLAS']}"
        )
    losing = [name for name, got in results.items() if got["prefill s"] > results["mlx's own"]["prefill s"]]
    print("Slower than mlx's own:", ", ".join(losing) or "nothing")
    save(arguments, results)


if __name__ == "__main__":
    main()
