"""What the harness says about kernels that are known to be right: mlx's own attention, as the wheel has it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_case import TOLERANCE
from msl_cpu import build
from msl_cpu.program import KERNELS, MLX_INCLUDE, Argument, Kind, Program
from msl_cpu.translate import flattened

pytestmark = pytest.mark.skipif(bool(build.problem()), reason=build.problem())

TYPES = {"float": mx.float32, "half": mx.float16, "bfloat": mx.bfloat16}
HEADS, KV_HEADS, TOKENS, DIM = 4, 2, 131, 128


def source() -> str:
    """mlx's sdpa_vector.h, its includes put in."""
    return flattened(KERNELS / "sdpa_vector.h", [build.INCLUDE, MLX_INCLUDE])


class Heads:
    """Random queries, keys and values, and their attention in float64."""

    def __init__(self, kind: str, mask: bool = False) -> None:
        rng = np.random.default_rng(0)
        self.dtype = TYPES[kind]
        self.q, self.k, self.v = (
            mx.array(rng.standard_normal(shape).astype(np.float32)).astype(self.dtype)
            for shape in ((HEADS, DIM), (KV_HEADS, TOKENS, DIM), (KV_HEADS, TOKENS, DIM))
        )
        self.mask = rng.random((HEADS, TOKENS)) > 0.3 if mask else None
        self.scale = np.float32(DIM**-0.5)

    def arrays(self) -> list[Argument]:
        return [Argument(_numbers(array)) for array in (self.q, self.k, self.v)]

    def expected(self) -> np.ndarray[Any, Any]:
        q, k, v = (np.array(x.astype(mx.float32)).astype(np.float64) for x in (self.q, self.k, self.v))
        scores = np.einsum("hd,htd->ht", q, k.repeat(HEADS // KV_HEADS, axis=0)) * self.scale
        if self.mask is not None:
            scores = np.where(self.mask, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        return np.einsum("ht,htd->hd", weights, v.repeat(HEADS // KV_HEADS, axis=0))

    def error(self, out: np.ndarray[Any, Any]) -> float:
        array = mx.array(out).view(mx.bfloat16) if self.dtype == mx.bfloat16 else mx.array(out)
        return float(np.abs(np.array(array.astype(mx.float32)) - self.expected()).max())


def _numbers(array: mx.array) -> np.ndarray[Any, Any]:
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def number(value: Any, dtype: Any = np.int32) -> Argument:
    return Argument(np.array(value, dtype))


def absent(count: int) -> list[Argument]:
    return [Argument(None)] * count


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("kind", TYPES)
def test_mlx_attention_of_one_query(kind: str, mask: bool) -> None:
    heads = Heads(kind, mask)
    program = Program(source(), "sdpa_vector", f"{kind}, {DIM}, {DIM}", "check" if kind == "float" else "fast")
    results = []
    for schedule in (0, 1):
        out = Argument(np.zeros_like(_numbers(heads.q)), Kind.OUTPUT)
        strides = [number(TOKENS * DIM, np.uint64), number(DIM, np.uint64)]
        masks = [Argument(heads.mask), *absent(1), number(1), number(0), number(TOKENS)] if mask else absent(5)
        program.run(
            [*heads.arrays(), out, number(HEADS // KV_HEADS), number(TOKENS), *strides, *strides,
             number(heads.scale, np.float32), *masks, *absent(2)],
            (HEADS * 1024, 1, 1), (1024, 1, 1), schedule,
            {"has_mask": mask, "query_transposed": False, "do_causal": False, "bool_mask": mask, "float_mask": False,
             "has_sinks": False},
        )  # fmt: skip
        results.append(out.data)
    assert heads.error(results[0]) < TOLERANCE[heads.dtype]
    assert results[0].tobytes() == results[1].tobytes()


@pytest.mark.parametrize("kind", TYPES)
def test_mlx_attention_in_two_passes(kind: str) -> None:
    heads, blocks = Heads(kind), 32
    constants = {"has_mask": False, "query_transposed": False, "do_causal": False, "bool_mask": False,
                 "float_mask": False, "has_sinks": False, "blocks": blocks}  # fmt: skip
    first = Program(source(), "sdpa_vector_2pass_1", f"{kind}, {DIM}, {DIM}", "fast")
    second = Program(source(), "sdpa_vector_2pass_2", f"{kind}, {DIM}", "fast")
    size = np.uint16 if heads.dtype == mx.bfloat16 else _numbers(heads.q).dtype
    partial = Argument(np.zeros((HEADS, blocks, DIM), size), Kind.OUTPUT)
    sums, tops = (Argument(np.zeros((HEADS, blocks), np.float32), Kind.OUTPUT) for _ in range(2))
    strides = [number(TOKENS * DIM, np.uint64), number(DIM, np.uint64)]
    group = HEADS // KV_HEADS
    first.run(
        [*heads.arrays(), partial, sums, tops, number(TOKENS), *strides, *strides,
         number(heads.scale, np.float32), *absent(6)],
        (32 * KV_HEADS, group, blocks), (32, group, 1), 0, constants,
    )  # fmt: skip
    out = Argument(np.zeros_like(_numbers(heads.q)), Kind.OUTPUT)
    inputs = [Argument(partial.data), Argument(sums.data), Argument(tops.data)]
    second.run([*inputs, out, number(blocks)], (1024 * HEADS, 1, 1), (1024, 1, 1), 0, {"blocks": blocks})
    assert heads.error(out.data) < 2 * TOLERANCE[heads.dtype]  # parts are rounded to the dtype, too
