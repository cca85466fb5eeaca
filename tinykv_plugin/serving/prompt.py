"""Prompt: a request made ready for the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_lm import server as mlx_server

from .failures import InvalidRequestError

SEEDS = 2**64  # mlx's are unsigned


@dataclass(frozen=True)
class Prompt:
    """A tokenized request and how its answer is to be made.

    ``segments`` are the tokens, cut where another prompt may branch off.
    ``context`` is what the client's thread needs to read the answer.
    """

    tokens: list[int]
    segments: list[list[int]]
    max_tokens: int
    sampler: Any
    logits_processors: list[Any]
    stop_sequences: Any
    context: Any


def require_usable(args: Any, vocabulary: int) -> None:
    """Raise InvalidRequestError if a request's arguments have values that mlx-lm lets in but fails with later."""
    for token in args.logits.logit_bias or ():
        # mlx doesn't check indices: it would read and write somewhere else.
        if not 0 <= token < vocabulary:
            raise InvalidRequestError(f"logit_bias: the model has {vocabulary} tokens, not {token}")
    if args.seed is not None and not 0 <= args.seed < SEEDS:
        raise InvalidRequestError(f"seed: it has to be from 0 to {SEEDS - 1}, not {args.seed}")
    stop = args.stop_words
    if not (isinstance(stop, list) and all(isinstance(word, str) for word in stop)):
        raise InvalidRequestError(f"stop: it has to be a text or a list of texts, not {stop!r:.80}")


def tokenize(theirs: Callable[..., Any], tokenizer: Any, request: Any, args: Any) -> Any:
    """What mlx-lm's ``_tokenize``, ``theirs``, makes of a request. Raises InvalidRequestError if it isn't a prompt."""
    try:
        tokenized = theirs(tokenizer, request, args)
    except Exception as error:
        raise InvalidRequestError(f"the prompt can't be tokenized: {type(error).__name__}: {error}") from None
    if request.request_type == "text" and not isinstance(request.prompt, str):
        # Tokenizers take some lists, for something else than one text.
        raise InvalidRequestError(f"the prompt has to be one text, not {type(request.prompt).__name__}")
    if not tokenized[0]:
        raise InvalidRequestError("the prompt is empty: it has to have a token at least")
    return tokenized


def make_prompt(generator: Any, request: Any, args: Any) -> Prompt:
    """Make ``request`` ready with the methods of ``generator``, a response generator of mlx-lm."""
    provider = generator.model_provider
    tokenizer = provider.tokenizer
    tokens, segments, _, initial_state, _ = generator._tokenize(tokenizer, request, args)
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
        args.max_tokens,
        mlx_server._make_sampler(args, tokenizer),
        mlx_server._make_logits_processors(args),
        stop_sequences,
        context,
    )
