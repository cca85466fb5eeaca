"""Changes of the shipped kernels that break them, what shows it, and how it is reported."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from open_pages import CALLS, errors

from metal_case import TOLERANCE, Case, error, new_tokens, wide
from msl_cpu.program import KernelError
from tinykv_plugin.gather import GatherBackend
from tinykv_plugin.kv_format import KVFormat


class WrongNumbersError(AssertionError):
    """The kernel ran without a complaint, and its result is wrong."""


class Replace:
    """Changes ``old`` to ``new`` in the kernel ``name``, its text or what it shares with others."""

    def __init__(self, name: str, old: str, new: str) -> None:
        self.name, self.old, self.new = f"tinykv_{name}", old, new

    def __call__(self, name: str, source: str, header: str) -> tuple[str, str]:
        if name == self.name:
            if self.old not in source + header:
                raise LookupError(f"{self.old!r} is not in the source any more")
            source, header = (text.replace(self.old, self.new) for text in (source, header))
        return source, header


def attend(backend: Any) -> None:
    case = Case([600, 77, 2], query_heads=4, kv_heads=2, page_size=16).fill(backend)
    if not error(case.attend(backend), case.expected()) < TOLERANCE[mx.float32]:
        raise WrongNumbersError


def attend_sets(backend: Any) -> None:
    """More query heads of a group than registers: two sets of simdgroups, and tiles of 32 tokens."""
    case = Case([70, 3], query_heads=16, kv_heads=1, page_size=8).fill(backend)
    if not error(case.attend(backend), case.expected()) < TOLERANCE[mx.float32]:
        raise WrongNumbersError


def attend_window_sets(backend: Any) -> None:
    case = Case([77, 20], 4, window=9, query_heads=4, kv_heads=1, page_size=8).fill(backend)
    if not error(case.attend(backend), case.expected()) < TOLERANCE[mx.float32]:
        raise WrongNumbersError


def attend_window(backend: Any) -> None:
    case = Case([77, 20], 2, window=24, page_size=8).fill(backend)
    if not error(case.attend(backend), case.expected()) < TOLERANCE[mx.float32]:
        raise WrongNumbersError


def attend_sinks(backend: Any) -> None:
    sinks = mx.array([0.5, 2.0, -1.0, 3.0])
    case = Case([20]).fill(backend)
    if not error(case.attend(backend, sinks=sinks), case.expected(sinks=sinks)) < TOLERANCE[mx.float32]:
        raise WrongNumbersError


def attend_odd_dim(backend: Any) -> None:
    case = Case([20], key_dim=80).fill(backend)
    if not error(case.attend(backend), case.expected()) < TOLERANCE[mx.float32]:
        raise WrongNumbersError


def attend_quantized(backend: Any) -> None:
    case = Case([20, 9], key_dim=96, value_dim=64, kv_format=KVFormat(5, 4, 32)).fill(backend)
    if not error(case.attend(backend), case.expected()) < TOLERANCE[mx.float32]:
        raise WrongNumbersError


def attend_open(backend: Any) -> None:
    if not max(errors(backend, CALLS["drafts"])) < 2e-5:
        raise WrongNumbersError


def attend_open_sets(backend: Any) -> None:
    if not max(errors(backend, CALLS["many query heads"])) < 2e-5:
        raise WrongNumbersError


def attend_full(backend: Any) -> None:
    if not max(errors(backend, CALLS["full precision at the start"])) < 2e-5:
        raise WrongNumbersError


def prefill(backend: Any) -> None:
    """Kept tokens and newest ones of two rows, copied together for mlx's attention."""
    case = Case([50, 26], window=24, keep=4).fill(backend)
    if not error(case.attend(GatherBackend()), case.expected()) < TOLERANCE[mx.float32]:
        raise WrongNumbersError


def write(backend: Any) -> None:
    case = Case([20, 5, 33], 3, [3, 1, 3]).fill(backend)
    keys, values = new_tokens(case, 3)
    before = wide(case.pages.keys), wide(case.pages.values)
    backend.write(case.metadata, keys, values)
    for pool, old, new in zip((case.pages.keys, case.pages.values), before, (keys, values), strict=True):
        for row, (context, count) in enumerate(zip(case.contexts, case.query_lens or [], strict=True)):
            for i in range(count):
                at = context - count + i
                old[case.full_tables[row][at // 16], :, at % 16] = wide(new)[row, :, i]
        if not (wide(pool) == old).all(where=old == old):
            raise WrongNumbersError


def copy(backend: Any) -> None:
    case = Case([64]).fill(backend)
    right = wide(case.pages.values)
    right[5] = right[1]
    backend.copy_pages(case.pages, [1], [5])
    if not (wide(case.pages.values) == right).all(where=right == right):
        raise WrongNumbersError


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
FAULTS: dict[str, tuple[Any, Replace, type[AssertionError], str]] = {
    "a page id beyond the pool": (
        attend,
        Replace("attend", "page_ids[start + first / PAGE]", "4000"),
        KernelError,
        "OUT OF BOUNDS",
    ),
    "a negative page id": (
        attend,
        Replace("attend", "page_ids[start + first / PAGE]", "-1"),
        KernelError,
        "OUT OF BOUNDS",
    ),
    "page ids read beyond their end": (
        attend,
        Replace("attend", "start + first / PAGE", "start + 4000 + first / PAGE"),
        KernelError,
        "OUT OF BOUNDS",
    ),
    "a token too many": (
        attend,
        Replace("attend", "return position < end &&", "return position <= end &&"),
        WrongNumbersError,
        "",
    ),
    "a token too few": (
        attend,
        Replace("attend", "return position < end &&", "return position < end - 1 &&"),
        WrongNumbersError,
        "",
    ),
    "no barrier before the sums are read": (
        attend,
        Replace("attend", f"  {BARRIER}\n  for (int i = thread", "  for (int i = thread"),
        KernelError,
        "NOT INITIALISED: threadgroup 'scratch'",
    ),
    "no barrier before the next vector": (
        attend,
        Replace("attend", f"  }}\n  {BARRIER}\n}}", "  }\n}"),
        KernelError,
        "RACE",
    ),
    "a barrier that orders nothing": (
        attend,
        Replace("attend", BARRIER, "threadgroup_barrier(mem_flags::mem_none);"),
        KernelError,
        "RACE",
    ),
    "a barrier for device memory only": (
        attend,
        Replace("attend", BARRIER, "threadgroup_barrier(mem_flags::mem_device);"),
        KernelError,
        "RACE",
    ),
    "a barrier that some threads don't reach": (
        attend,
        Replace("attend", f"}}\n{BARRIER}\n", f"}}\n{BARRIER}\nif (simdgroup == 0) {BARRIER}\n"),
        KernelError,
        "DIVERGENCE",
    ),
    "a barrier after some threads have returned": (
        attend,
        Replace("attend", f"}}\n{BARRIER}\n", f"}}\nif (simdgroup == 1) return;\n{BARRIER}\n"),
        KernelError,
        "DIVERGENCE",
    ),
    "a sum over some of the lanes": (
        attend,
        Replace("attend", "s = simd_sum(products);", "if (lane < 16) s = simd_sum(products);"),
        KernelError,
        "DIVERGENCE",
    ),
    "lanes in different sums": (
        attend,
        Replace(
            "attend",
            "s = simd_sum(products);",
            "if (lane < 16) { s = simd_sum(products); }\n else { s = simd_sum(products); }",
        ),
        KernelError,
        "DIVERGENCE",
    ),
    "threadgroup memory too small": (
        attend,
        Replace("attend", "scratch[SCRATCH_FLOATS]", "scratch[SCRATCH_FLOATS - 1]"),
        KernelError,
        "OUT OF BOUNDS|UNDEFINED",
    ),
    "more threadgroup memory than there is": (
        attend,
        Replace("attend", "scratch[SCRATCH_FLOATS]", "scratch[SCRATCH_FLOATS * 32]"),
        KernelError,
        "THREADGROUP MEMORY",
    ),
    "threadgroup memory that nobody wrote": (
        attend,
        Replace("attend", "    sums[v * SIMDGROUPS + simdgroup] = sum[v];\n", ""),
        KernelError,
        "NOT INITIALISED",
    ),
    "all heads write the first one": (
        attend,
        Replace("attend", "const int64_t at = vector * extent[3]", "const int64_t at = 0 * vector * extent[3]"),
        KernelError,
        "RACE",
    ),
    "the end of an output not written": (
        attend,
        Replace("attend", "i < SETS * V_DIM;", "i < SETS * V_DIM - 8;"),
        KernelError,
        "NEVER WRITTEN",
    ),
    "no token": (attend, Replace("attend", "token[0] = 0;", ""), KernelError, "NEVER WRITTEN"),
    "a write to an input": (
        attend,
        Replace(
            "attend", "  float score[PASS * TOKENS];", "  writable(key_pages)[key] = 0;\n  float score[PASS * TOKENS];"
        ),
        KernelError,
        "INPUT WRITTEN",
    ),
    "a thread's array too short": (
        attend,
        Replace("attend", "float score[PASS * TOKENS];", "float score[PASS * TOKENS - 1];"),
        KernelError,
        "UNDEFINED",
    ),
    "elements read together that are not aligned": (
        attend,
        Replace("attend", "Run<T, run>::load(token + dim", "Run<T, run>::load(token + (dim + 1) % D"),
        KernelError,
        "UNDEFINED BEHAVIOUR .* alignment",
    ),
    "the wrong K/V head": (
        attend,
        Replace("attend", "kv_head = threadgroup_position_in_grid.y / PASSES", "kv_head = 0 * PASSES"),
        KernelError,
        "RACE|NEVER",
    ),
    "query heads of another group": (
        attend,
        Replace(
            "attend",
            "kv_head * GROUP + vector / QUERIES) * queries_strides[1]",
            "vector * kv_heads + kv_head) * queries_strides[1]",
        ),
        WrongNumbersError,
        "",
    ),
    "sums not scaled to the new maximum": (
        attend,
        Replace("attend", "o[v * V_SIZE + i] *= factor;", ""),
        WrongNumbersError,
        "",
    ),
    "no barrier before a tile is read": (
        attend_sets,
        Replace("attend", f"      {BARRIER}\n    }}\n", "    }\n"),
        KernelError,
        "RACE on 'scratch'|NOT INITIALISED: threadgroup 'scratch'",
    ),
    "no barrier before the next tile": (
        attend_sets,
        Replace("attend", f"    {BARRIER}  // everyone", "    // everyone"),
        KernelError,
        "RACE on 'scratch'",
    ),
    "values of a tile where its keys are": (
        attend_sets,
        Replace("attend", "TILE * K_SIZE + u", "u"),
        KernelError,
        "RACE on 'scratch'",
    ),
    "a token of a tile too far": (
        attend_sets,
        Replace("attend", "(first - tile + u) * K_SIZE", "(first - tile + u + 1) * K_SIZE"),
        KernelError,
        "NOT INITIALISED: threadgroup 'scratch'",
    ),
    "all sets with the vectors of the first": (
        attend_sets,
        Replace("attend", "pass_vector + set * PASS", "pass_vector + 0 * set"),
        WrongNumbersError,
        "",
    ),
    "sums of another set": (
        attend_sets,
        Replace("attend", "v * SIMDGROUPS + of * MEMBERS", "v * SIMDGROUPS"),
        WrongNumbersError,
        "",
    ),
    "a tile skipped that a query sees": (
        attend_window_sets,
        Replace("attend", "if (tile + TILE <= low", "if (tile <= low"),
        WrongNumbersError,
        "",
    ),
    "no scale": (attend, Replace("attend", "? scale * float(", "? float("), WrongNumbersError, ""),
    "parts put together without their maxima": (
        attend,
        Replace("reduce", "softmax_factor(stats[2 * at], top)", "1.0f"),
        WrongNumbersError,
        "",
    ),
    "a part left out": (
        attend,
        Replace("reduce", "int part = 0; part < parts", "int part = 1; part < parts"),
        WrongNumbersError,
        "",
    ),
    "a window one token too long": (
        attend_window,
        Replace("attend", "position > own - (window", "position >= own - (window"),
        WrongNumbersError,
        "",
    ),
    "a window masked and not skipped": (
        attend_window,
        Replace("attend", "rows[4 * row + 2]", "0"),
        KernelError,
        "OUT OF BOUNDS",
    ),
    "drafts that see later ones": (
        attend_window,
        Replace("attend", "seen = seen && position <= own;", ""),
        WrongNumbersError,
        "",
    ),
    "a sink counted twice": (
        attend_sinks,
        Replace("attend", "+ fast::exp(sink - higher)", "+ 2.0f * fast::exp(sink - higher)"),
        WrongNumbersError,
        "",
    ),
    "sinks of other heads": (
        attend_sinks,
        Replace("attend", "sinks[kv_head * GROUP + in_head / QUERIES]", "sinks[0]"),
        WrongNumbersError,
        "",
    ),
    "lanes beyond the head dim": (
        attend_odd_dim,
        Replace("attend", "D % 32 == 0 || dim < D", "true"),
        KernelError,
        "OUT OF BOUNDS: buffer 'key_pages'",
    ),
    "open: page ids of the others, in tiles": (
        attend_open_sets,
        Replace("attend", "open_page_ids[open_start + position / PAGE]", "page_ids[start + position / PAGE]"),
        WrongNumbersError,
        "",
    ),
    "open: a page that is both": (
        attend_open,
        Replace("attend", "(position >= first_open(own, PAGE, full_until)) == opened", "true"),
        WrongNumbersError,
        "",
    ),
    "open: the last page only": (
        attend_open,
        Replace("attend", "first_open(context_len - query_len, PAGE", "first_open(context_len - 1, PAGE"),
        WrongNumbersError,
        "",
    ),
    "open: rows as long as packed ones": (
        attend_open,
        Replace("attend", "opened ? K_DIM : K_ROW", "K_ROW"),
        WrongNumbersError,
        "",
    ),
    "open: no full precision at the start": (
        attend_full,
        Replace("attend", "own < full_until ? 0 : own", "own"),
        WrongNumbersError,
        "",
    ),
    "quantized: no bias": (attend_quantized, Replace("attend", "1u)) + bias;", "1u));"), WrongNumbersError, ""),
    "quantized: the scale of another group": (
        attend_quantized,
        Replace("attend", "scales[dim / GROUP]", "scales[0]"),
        WrongNumbersError,
        "",
    ),
    "quantized: an element cut at the end of a word": (
        attend_quantized,
        Replace("attend", "if (32 % BITS != 0 && bit % 32 + BITS > 32)", "if (false)"),
        WrongNumbersError,
        "",
    ),
    "quantized: rows as long as the head dim": (
        attend_quantized,
        Replace("attend", "u * K_ROW", "u * K_DIM"),
        WrongNumbersError,
        "",
    ),
    "prefill: the newest tokens from a wrong place": (
        prefill,
        Replace("gather", "column - kept + newest", "column - kept + newest - 1"),
        WrongNumbersError,
        "",
    ),
    "prefill: pages of another row": (
        prefill,
        Replace("gather", "rows[4 * row + 3]", "rows[4 * (1 - row) + 3]"),
        WrongNumbersError,
        "",
    ),
    "tokens of padding written": (write, Replace("write", "slot >= 0 &&", ""), KernelError, "OUT OF BOUNDS"),
    "keys written into values": (
        write,
        Replace("write", "writable(value_pages)", "writable(key_pages)"),
        WrongNumbersError,
        "",
    ),
    "strides of values not used": (
        write,
        Replace("write", "column * values_strides[2]", "column * value_dim"),
        WrongNumbersError,
        "",
    ),
    "a write in place that isn't declared": (
        write,
        Replace("write", "// written in place: key_pages, value_pages", "// written in place: key_pages"),
        KernelError,
        "INPUT WRITTEN: 'value_pages'",
    ),
    "the wrong page copied": (copy, Replace("copy", "value_pages[source", "value_pages[target"), WrongNumbersError, ""),
    "a copy beyond the pool": (
        copy,
        Replace("copy", "target * value_size", "50 * target * value_size"),
        KernelError,
        "OUT OF BOUNDS",
    ),
    "an index of 32 bits": (
        copy,
        Replace(
            "copy",
            "const int64_t page_tokens = int64_t(key_pages_shape[1]) * key_pages_shape[2]",
            "const int page_tokens = key_pages_shape[1] * key_pages_shape[2] * 100000007",
        ),
        KernelError,
        "UNDEFINED|BOUNDS",
    ),
}
