"""Prompt: a request made ready for the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_lm import server as mlx_server


@dataclass(frozen=True)
class Prompt:
    """A tokenized request and how its answer is to be made.

    ``segments`` are the tokens, cut where another prompt may branch off; ``kinds`` says what each segment is.
    ``context`` is what the client's thread needs to read the answer.
    """

    tokens: list[int]
    segments: list[list[int]]
    kinds: list[str]
    max_tokens: int
    sampler: Any
    logits_processors: list[Any]
    stop_sequences: Any
    context: Any

    def after(self, count: int) -> tuple[list[list[int]], list[str]]:
        """What is left of the segments, and their kinds, after the first ``count`` tokens."""
        left = []
        for segment, kind in zip(self.segments, self.kinds, strict=True):
            if count < len(segment):
                left.append((segment[count:], kind))
            count = max(0, count - len(segment))
        return [segment for segment, _ in left], [kind for _, kind in left]


def make_prompt(generator: Any, request: Any, args: Any) -> Prompt:
    """Make ``request`` ready with the methods of ``generator``, a response generator of mlx-lm."""
    provider = generator.model_provider
    tokenizer = provider.tokenizer
    tokens, segments, kinds, initial_state, _ = generator._tokenize(tokenizer, request, args)
    stop_sequences, text_sm = generator._make_state_machine(provider.model_key, tokenizer, args.stop_words)
    context = mlx_server.GenerationContext(
        has_tool_calling=tokenizer.has_tool_calling,
        has_thinking=tokenizer.has_thinking,
        tool_parser=tokenizer.tool_parser,
        text_sm=text_sm,
        initial_state=initial_state,
        prompt=tokens,
    )
    return Prompt(
        tokens,
        segments,
        kinds,
        args.max_tokens,
        mlx_server._make_sampler(args, tokenizer),
        mlx_server._make_logits_processors(args),
        stop_sequences,
        context,
    )
