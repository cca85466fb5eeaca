"""Trials: a backend's self-test at its first use, kept for as long as device, versions and kernels stay the same."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from ..protocols import AttentionBackend, AttentionRequest, TriedBackend
from .comparison import compare
from .outcomes import Outcome, Outcomes, kind_of

log = logging.getLogger("tinykv")


@dataclass(frozen=True)
class Trial:
    """``problem`` is why the backend may not serve ("": it may), ``outcome`` what is known of its speed."""

    problem: str = ""
    outcome: Outcome = field(default_factory=Outcome)


_tried: dict[tuple[str, str, str], Trial] = {}


def try_out(backend: AttentionBackend, gather: AttentionBackend, request: AttentionRequest) -> Trial:
    """Whether ``backend`` may serve calls like ``request`` here.

    Backends without a ``selftest_key`` vouch for themselves. Others are compared with ``gather`` unless that was done
    before; one that fails is compared again in the next process. Never raises.
    """
    if not isinstance(backend, TriedBackend):
        return Trial()
    key = backend.selftest_key()
    place = (backend.name, key, kind_of(request))
    trial = _tried.get(place)
    if trial is None:
        trial = _tried[place] = _try_out(backend, gather, request, key)
    return trial


def forget() -> None:
    """Read the kept outcomes again from now on."""
    _tried.clear()


def _try_out(backend: AttentionBackend, gather: AttentionBackend, request: AttentionRequest, key: str) -> Trial:
    outcomes = Outcomes()
    outcome = outcomes.find(key, request)
    if outcome is None:
        comparison = compare(backend, gather, request)
        if comparison.problem:
            problem = f"it failed its self-test on this device: {comparison.problem}"
            log.warning(
                "the backend %r is not used: %s (%s; %s); attention is computed by %r. "
                "`tinykv selftest` shows more, please report it",
                backend.name, problem, kind_of(request), key, gather.name,
            )  # fmt: skip
            return Trial(problem)
        outcome = Outcome()
        outcomes.record(key, request, outcome)
        log.info("the backend %r passed its self-test: %s", backend.name, kind_of(request))
    return Trial(outcome=outcome)
