"""PrefixCounts: how often the prefix cache had what was asked for."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PrefixCounts:
    """What happened so far.

    Tokens of prompts that were found (``hit_tokens``) and not (``missed_tokens``), prompts of which something was found
    (``hits``) and not (``misses``), tokens that came from the disk (``disk_tokens``, among those found), tokens that
    were stored but could not be used (``refused``), by reason.
    """

    hit_tokens: int = 0
    missed_tokens: int = 0
    hits: int = 0
    misses: int = 0
    disk_tokens: int = 0
    refused: dict[str, int] = field(default_factory=dict)

    def add(self, found: int, missed: int) -> None:
        """Count a prompt of which ``found`` tokens were stored and ``missed`` are run."""
        self.hit_tokens += found
        self.missed_tokens += missed
        self.hits += found > 0
        self.misses += not found

    def refuse(self, reason: str, tokens: int) -> None:
        """Count ``tokens`` that were stored but could not be used."""
        self.refused[reason] = self.refused.get(reason, 0) + tokens
