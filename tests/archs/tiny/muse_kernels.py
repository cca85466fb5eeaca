"""muse_spark's norms and its choice of experts without Metal; caches don't depend on how they are computed."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import mlx.core as mx


def use_plain(module: ModuleType) -> None:
    """Give the model's module these functions in place of mlx-lm's kernels, where there is no Metal."""
    if not mx.metal.is_available():
        for function in _FUNCTIONS:
            setattr(module, function.__name__, function)
        vars(module)["mx"] = _Float32()


class _Float32:
    """mlx without bfloat16: what is rounded to it in the middle of the model can't be compared in float32."""

    bfloat16 = mx.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)


def pre_norm(stream: mx.array, norm: Any, *, dtype: mx.Dtype) -> mx.array:
    return mx.fast.rms_norm(stream, norm.weight, norm.eps).astype(dtype)


def norm_add_norm(
    branch: mx.array,
    stream: mx.array,
    *,
    alpha: mx.array,
    beta: mx.array,
    post_weight: mx.array | None,
    post_eps: float,
    next_norm: Any,
) -> tuple[mx.array, mx.array | None]:
    total = alpha * stream + beta * mx.fast.rms_norm(branch, post_weight, post_eps)
    return total, None if next_norm is None else pre_norm(total, next_norm, dtype=branch.dtype)


def post_expert_norm_combine(experts: mx.array, weights: mx.array, *, norm_weight: mx.array, eps: float) -> mx.array:
    return (mx.fast.rms_norm(experts * norm_weight, None, eps) * weights[..., None]).sum(axis=-2)


def expert_routing(
    logits: mx.array, expert_bias: mx.array, *, top_k: int, multiplier: float, score_eps: float, route_scale: float
) -> list[mx.array]:
    scores = mx.sigmoid(logits * multiplier)
    chosen = mx.argpartition(-(scores + expert_bias), top_k - 1, axis=-1)[..., :top_k]
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    return [chosen.astype(mx.uint32), weights / (weights.sum(axis=-1, keepdims=True) + score_eps) * route_scale]


def qk_norm(
    qkvg: mx.array, *, n_heads: int, n_kv_heads: int, head_dim: int, eps: float, query_scale: float
) -> list[mx.array]:
    batch, count, _ = qkvg.shape
    heads = qkvg[..., : (n_heads + n_kv_heads) * head_dim].reshape(batch, count, -1, head_dim)
    heads = mx.fast.rms_norm(heads, None, eps)
    return [heads[:, :, :n_heads] * query_scale, heads[:, :, n_heads:]]


def qk_norm_rope(qkvg: mx.array, *, rope_base: float, offset: int | mx.array, **norm: Any) -> list[mx.array]:
    return [
        mx.fast.rope(
            part.swapaxes(1, 2), norm["head_dim"], traditional=True, base=rope_base, scale=1.0, offset=offset
        ).swapaxes(1, 2)
        for part in qk_norm(qkvg, **norm)
    ]


def rms_norm_sigmoid_gate(x: mx.array, gate: mx.array, *, eps: float) -> mx.array:
    batch, heads, count, dim = x.shape
    normed = mx.fast.rms_norm(x, None, eps).swapaxes(1, 2).reshape(batch, count, heads * dim)
    return normed * mx.sigmoid(gate)


_FUNCTIONS = (
    expert_routing,
    norm_add_norm,
    post_expert_norm_combine,
    pre_norm,
    qk_norm,
    qk_norm_rope,
    rms_norm_sigmoid_gate,
)
