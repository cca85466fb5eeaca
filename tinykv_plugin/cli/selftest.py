"""``tinykv selftest``: backends compared with gather on this device, and timed; a table to paste into a report."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from ..config import KVCacheConfig
from .console import console, log_to_stderr
from .failures import FAILED
from .flags import take_kv_flags
from .forward import check_plugins
from .parser import command_parser, positive
from .version import version_lines

if TYPE_CHECKING:
    from ..protocols import AttentionBackend, AttentionRequest, MaskKind
    from ..selftest.timing import Timing

# A token, and what mlx-lm's speculative decoding verifies at once unless told otherwise.
QUERY_LENS = (1, 4)


def selftest(argv: Sequence[str]) -> int:
    """Compare and time; 1 if a backend that serves here gives wrong numbers."""
    fields, rest = take_kv_flags(argv)
    parser = command_parser(
        "selftest",
        "Compare the backends that read pages directly with gather on this device, and time a decode "
        "step's attention. What passed serves without a test of its own from then on, and gather serves the lengths "
        "at which it was faster.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=Path,
        nargs="?",
        help="folder of a model, for its kinds of calls; reads no weights",
    )
    parser.add_argument(
        "--contexts", type=positive, nargs="+", default=[1024, 4096, 16384], help="tokens a row to time"
    )
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 8], help="rows to time")
    options = parser.parse_args(rest)
    config = KVCacheConfig(**fields)
    with log_to_stderr(verbose=config.verbose):
        check_plugins(config)
        requests = _requests(config, options.model)
        return _run(config, requests, options.contexts, options.batches)


def _run(
    config: KVCacheConfig, requests: Sequence[AttentionRequest], contexts: Sequence[int], batches: Sequence[int]
) -> int:
    from ..layer import reasons_against
    from ..manager import default_manager
    from ..selftest.comparison import compare
    from ..selftest.outcomes import kind_of

    manager = default_manager()
    out, gather = console(), manager.gather()
    out.print("\n".join(escape(line) for line in version_lines()), end="\n\n")
    candidates = [backend for backend in manager.backends(config.attention) if backend.direct]
    table = Table("backend", "calls", "error", "allowed", "outcome", title="compared with gather", title_justify="left")
    timings: dict[tuple[str, str], list[Timing]] = {}
    failed = False
    for backend in candidates:
        for request in requests:
            reasons = reasons_against(backend, request)
            if reasons:
                table.add_row(
                    backend.name, escape(kind_of(request)), "", "", escape(f"not served: {', '.join(reasons)}")
                )
                continue
            comparison = compare(backend, gather, request)
            failed |= bool(comparison.problem)
            cells = (f"{comparison.error:.1e}", f"{comparison.allowed:.0e}", comparison.problem or "passed")
            table.add_row(backend.name, *map(escape, (kind_of(request), *cells)))
            measured: list[Timing] = []
            if not comparison.problem and request.query_len == 1:
                measured = timings[backend.name, kind_of(request)] = _measured(
                    backend, gather, request, contexts, batches
                )
            _keep(backend, request, comparison.problem, measured)
    if not candidates:
        out.print("no backend that reads pages directly is installed or chosen")
        return 0
    out.print(table)
    for (name, kind), measured in timings.items():
        # As a title it would be cut to the table's width.
        out.print(escape(f"a decode step of one layer: {kind}"), soft_wrap=True)
        out.print(_timing_table(name, measured))
    return FAILED if failed else 0


def _measured(
    backend: AttentionBackend,
    gather: AttentionBackend,
    request: AttentionRequest,
    contexts: Sequence[int],
    batches: Sequence[int],
) -> list[Timing]:
    """Timings as far as there is memory for them."""
    from ..selftest.timing import measure

    found = []
    for batch in batches:
        for context in contexts:
            try:
                found.append(measure(backend, gather, request, batch, context))
            except (MemoryError, RuntimeError) as error:
                console(stderr=True).print(escape(f"{batch} rows of {context:,} tokens can't be timed: {error}"))
    return found


def _keep(backend: AttentionBackend, request: AttentionRequest, problem: str, measured: Sequence[Timing]) -> None:
    from ..protocols import TriedBackend
    from ..selftest.outcomes import Outcomes
    from ..selftest.timing import outcome_of
    from ..selftest.trial import forget

    if isinstance(backend, TriedBackend):
        Outcomes().record(backend.selftest_key(), request, None if problem else outcome_of(measured))
        forget()


def _timing_table(name: str, measured: Sequence[Timing]) -> Table:
    table = Table("rows", "tokens", "dense ms", "gather ms", f"{name} ms", "gather / " + name)
    for timing in measured:
        table.add_row(
            str(timing.batch),
            f"{timing.context:,}",
            *(f"{value:.3f}" for value in (timing.dense, timing.gather, timing.paged)),
            f"{timing.gather / timing.paged:.2f}",
        )
    return table


def _requests(config: KVCacheConfig, model: Path | None) -> list[AttentionRequest]:
    """The kinds of decode calls of a model, each with one query token and with several; without one, a usual kind."""
    from ..selftest.outcomes import kind_of
    from ..selftest.sample import usual_request

    decode = [usual_request(config.page_size)] if model is None else _requests_of_model(config, model)
    kinds = {}
    for request in decode:
        for count in QUERY_LENS:
            mask: MaskKind = "array" if request.mask == "array" else "none" if count == 1 else "causal"
            call = dataclasses.replace(request, query_len=count, mask=mask)
            kinds[kind_of(call)] = call
    return list(kinds.values())


def _requests_of_model(config: KVCacheConfig, model: Path) -> list[AttentionRequest]:
    from ..attachment import attach
    from ..chunks import without_chunk
    from ..retention import KEPT_TOKENS
    from ..session import PagedSession
    from .model_files import load_lazily

    found = []
    with attach(load_lazily(model, trust_remote_code=False).model, config) as kv:
        layers = kv.session.layers if isinstance(kv.session, PagedSession) else ()
        for request in (layer.request for layer in layers):
            if request is None:
                continue
            if config.max_kv_size and request.window is None:
                request = dataclasses.replace(request, window=config.max_kv_size, keep=KEPT_TOKENS)
            found.append(without_chunk(request))
    return found
