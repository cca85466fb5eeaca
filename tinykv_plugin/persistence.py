"""Prompt caches on disk, in mlx-lm's own format: stock mlx-lm reads our files and we read its."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from . import layout
from .cache import PagedKVCache
from .errors import CacheStateError, PromptCacheFileError
from .file_header import KEY, FileHeader
from .open_tails import Tails, add_to_file, named, read_tails, tails_of
from .packed_cache import PackedKVCache, is_quantized, quantized_cache, stored_rows
from .pages import LayerSpec
from .reading import held_positions, open_tokens, stored_tokens
from .restore import HeldTokens, fill
from .retention import KEPT_TOKENS
from .session import PagedSession
from .unused import UnusedCache
from .whole_file import write_whole

if TYPE_CHECKING:
    from .attachment import Attachment


def save_prompt_cache(file_name: str | os.PathLike[str], cache: Sequence[Any], metadata: Any = None) -> None:
    """Write ``cache`` (one request's, paged or not) to a safetensors file that stock mlx-lm can load.

    Pages are copied together for the file; the cache is unchanged. The file appears whole or not at all.
    ``metadata`` is a dict of strings stored along, as in mlx-lm. The file says which version it is of, which weights it
    was computed by, and has a checksum.
    """
    for leaf in layout.leaves(cache):
        if isinstance(leaf, PagedKVCache):
            with leaf._session.lock:
                leaf._row.heal()  # what a pass that broke off has left in some layers is not saved
    dense = layout.replace_leaves(
        cache,
        {index: _dense(leaf) for index, leaf in enumerate(layout.leaves(cache))},
    )
    path = Path(file_name)
    # As mlx does.
    final = path if path.suffix == ".safetensors" else path.with_name(path.name + ".safetensors")
    more = named(tails_of(layout.leaves(cache)), len(dense))
    told = {**(metadata or {}), **FileHeader.of(dense, _model_of(cache), more).metadata()}

    def write(name: str) -> None:
        mlx_cache.save_prompt_cache(name, dense, told)
        if more:
            add_to_file(name, more)

    write_whole(final, write)


class LoadedCache(list[Any]):
    """Caches from a file of ours; ``model`` is the fingerprint of the weights that computed them, "" if unknown.

    ``tails`` are the tokens of open pages, by leaf.
    """

    def __init__(self, cache: Sequence[Any], model: str, tails: Tails) -> None:
        super().__init__(cache)
        self.model = model
        self.tails = tails


def load_prompt_cache(
    file_name: str | os.PathLike[str], return_metadata: bool = False, kv: Attachment | None = None
) -> Any:
    """The cache in a file written by us or by stock mlx-lm, and its metadata if asked for.

    With ``kv`` its K/V are put into pages of that attachment; without, they come back as mlx-lm's own caches (give
    them to :func:`adopt` later). Raises PromptCacheFileError for a file that can't be read or doesn't fit the model.
    """
    header = None
    try:
        cache, metadata = mlx_cache.load_prompt_cache(os.fspath(file_name), return_metadata=True)
        header = FileHeader.read(os.fspath(file_name))
    except PromptCacheFileError:
        raise
    except Exception as error:
        raise PromptCacheFileError(
            file_name, f"not a readable prompt cache of mlx-lm or tinykv ({type(error).__name__}: {error})"
        ) from None
    if header is not None:
        del metadata[KEY]
        ends = [getattr(leaf, "offset", 0) for leaf in layout.leaves(cache)]
        cache = LoadedCache(cache, header.model, read_tails(os.fspath(file_name), ends))
    if kv is not None:
        adopt(cache, kv, file_name)
    return (cache, metadata) if return_metadata else cache


def adopt(cache: list[Any], kv: Attachment, source: object = "this prompt cache") -> None:
    """Replace mlx-lm's own K/V caches in the list by paged ones of ``kv`` with the same tokens; modifies the list.

    Raises PromptCacheFileError naming ``source`` if they don't fit the model, OutOfPagesError if the budget is too
    small; the list is unchanged then.
    """
    session = kv.session
    if not isinstance(session, PagedSession):
        return
    if isinstance(cache, LoadedCache) and cache.model not in ("", session.prefix.fingerprint()):
        raise PromptCacheFileError(source, "was computed by other weights (another model, or another LoRA adapter)")
    own = layout.leaves(cache)
    limits = {leaf.max_size for leaf in own if _is_limited(leaf)}
    paged = kv.make_cache(max_kv_size=limits.pop() if len(limits) == 1 else None)
    expected = layout.leaves(paged)
    if len(own) != len(expected) or limits:
        raise PromptCacheFileError(source, f"holds {len(own)} caches, the model has {len(expected)}; another model's?")
    held: dict[int, HeldTokens] = {}
    tails = cache.tails if isinstance(cache, LoadedCache) else {}
    lengths = set()
    for index, (leaf, target) in enumerate(zip(own, expected, strict=True)):
        if isinstance(target, PagedKVCache):
            held[index] = replace(_held(leaf, target, index, source), tail=tails.get(index))
            lengths.add(int(leaf.offset))
        elif isinstance(target, UnusedCache) and leaf.empty():
            continue
        elif type(leaf) is not type(target):
            raise PromptCacheFileError(
                source, f"layer {index} is a {type(leaf).__name__}, the model's is a {type(target).__name__}"
            )
    if len(lengths) > 1:
        raise PromptCacheFileError(source, f"its layers have different lengths: {sorted(lengths)}")
    rows = [leaf._row for leaf in expected if isinstance(leaf, PagedKVCache)]
    if rows and lengths != {0}:
        with session.lock:
            try:
                fill(session, rows[0], lengths.pop(), held)
            except CacheStateError as error:
                raise PromptCacheFileError(source, str(error)) from None
        mx.eval([leaf.state for leaf in expected if isinstance(leaf, PagedKVCache)])
    kept = {i: leaf for i, leaf in enumerate(own) if not isinstance(expected[i], PagedKVCache | UnusedCache)}
    cache[:] = layout.replace_leaves(paged, kept)
    session.guard(cache)


def _model_of(cache: Sequence[Any]) -> str:
    """The fingerprint of the model whose pages are in ``cache``."""
    for leaf in layout.leaves(cache):
        if isinstance(leaf, PagedKVCache):
            return leaf._session.prefix.fingerprint()
    return cache.model if isinstance(cache, LoadedCache) else ""


def _is_limited(leaf: Any) -> bool:
    """Whether a cache was made with ``max_kv_size``."""
    return isinstance(leaf, mlx_cache.RotatingKVCache | PackedKVCache) and leaf.keep == KEPT_TOKENS


def _dense(leaf: Any) -> Any:
    """A paged cache's tokens in the class mlx-lm would have used, if it has one; other caches as they are."""
    if isinstance(leaf, UnusedCache):
        return leaf.stock()
    if not isinstance(leaf, PagedKVCache):
        return leaf
    retention = leaf._row.tables[leaf._layer.group].retention
    spec = leaf._layer.spec
    # Before quantized_start all tokens are there in full precision, which is what mlx-lm's own caches hold then.
    full = open_tokens(leaf._session, leaf._layer, leaf._row) if leaf._session.kv_format.start > leaf.offset else None
    if not leaf.empty() and spec is not None and spec != spec.unpacked and full is None:
        stored = stored_tokens(leaf._session, leaf._layer, leaf._row)
        return quantized_cache(spec, *stored, leaf.offset, retention.window, retention.keep)
    dense: Any
    if leaf._layer.chunk is not None:
        dense = mlx_cache.ChunkedKVCache(leaf._layer.chunk)
    elif retention.window is None:
        dense = mlx_cache.KVCache()
    else:
        dense = mlx_cache.RotatingKVCache(max_size=retention.window, keep=retention.keep)
    if not leaf.empty():
        if full is None:
            dense.keys, dense.values = leaf.keys_and_values()
        else:  # all tokens, of which mlx-lm's cache would hold those in reach
            held = mx.array(held_positions(leaf._layer, leaf._row))
            dense.keys, dense.values = (mx.take(side, held, axis=2) for side in full)
        dense.offset = leaf.offset
        if leaf._layer.chunk is not None:
            dense.start_position = leaf.offset - dense.keys.shape[2]
        elif retention.window is not None:
            count = min(leaf.offset, retention.window)
            dense.keys, dense.values = (_padded(side, count, retention.keep) for side in (dense.keys, dense.values))
            dense._idx = count
    return dense


def _padded(side: mx.array, count: int, keep: int) -> mx.array:
    """``side`` with ``count`` tokens, as a full ring of stock has: zeros for what no token will see any more."""
    batch, heads, held, dim = side.shape
    blank = mx.zeros((batch, heads, count - held, dim), side.dtype)
    return mx.concatenate([side[:, :, :keep], blank, side[:, :, keep:]], axis=2) if held < count else side


def _held(leaf: Any, target: PagedKVCache, index: int, source: object) -> HeldTokens:
    """The tokens of an mlx-lm cache, as a paged layer takes them."""
    window, spec = target.window, target._layer.spec
    if is_quantized(leaf):
        return _held_quantized(leaf, target, index, source)
    if getattr(leaf, "keys", None) is not None and spec is not None:
        holds = LayerSpec.of(leaf.keys, leaf.values)
        if holds != spec.unpacked:
            raise PromptCacheFileError(source, f"layer {index} holds {holds}, the model writes {spec.unpacked}")
    if type(leaf) is mlx_cache.KVCache:
        if leaf.keys is None:
            return HeldTokens(0, [])
        keys, values = leaf.keys_and_values()
        return HeldTokens(0, [(leaf.offset, keys, values)])
    if type(leaf) is mlx_cache.ChunkedKVCache and leaf.chunk_size == target._layer.chunk:
        if leaf.keys is None:
            return HeldTokens(0, [])
        return HeldTokens(leaf.start_position, [(leaf.offset, *leaf.keys_and_values())])
    if type(leaf) is not mlx_cache.RotatingKVCache or leaf.max_size != window or target._layer.chunk is not None:
        raise PromptCacheFileError(
            source,
            f"layer {index} is a {type(leaf).__name__} with a window of {getattr(leaf, 'max_size', None)}; "
            f"the model's pages have a window of {window}",
        )
    if leaf.keys is None:
        return HeldTokens(0, [])
    keys, values = leaf._temporal_order(leaf.keys), leaf._temporal_order(leaf.values)
    if keys.shape[2] == window < leaf.offset and not keys[:, :, leaf.keep].any().item():
        # The file was written when this one was gone: what is taken back must not come to see it.
        keys, values = (
            mx.concatenate([side[:, :, : leaf.keep], side[:, :, leaf.keep + 1 :]], axis=2) for side in (keys, values)
        )
    return _spans(keys, values, leaf.offset, leaf.keep)


def _held_quantized(leaf: Any, target: PagedKVCache, index: int, source: object) -> HeldTokens:
    """The tokens of a quantized cache: as they are for pages of the same format, dequantized for full precision."""
    window, spec = target.window, target._layer.spec
    if getattr(leaf, "max_size", None) != window:
        raise PromptCacheFileError(
            source,
            f"layer {index} is quantized with a window of {getattr(leaf, 'max_size', None)}; "
            f"the model's pages have a window of {window}",
        )
    if leaf.keys is None:
        return HeldTokens(0, [])
    assert spec is not None
    holds, keys, values = stored_rows(leaf)
    keep = getattr(leaf, "keep", 0)
    if holds == spec:
        return _spans(keys, values, leaf.offset, keep, stored=True)
    if holds.unpacked != spec.unpacked:
        raise PromptCacheFileError(source, f"layer {index} holds {holds.unpacked}, the model writes {spec.unpacked}")
    if spec != spec.unpacked:
        raise PromptCacheFileError(
            source,
            f"layer {index} holds {holds.storage()}, its pages hold {spec.storage()}: attach with the bits and "
            f"group_size of the file, or with none",
        )
    return _spans(*holds.decode(keys, values), leaf.offset, keep)


def _spans(keys: mx.array, values: mx.array, offset: int, keep: int, stored: bool = False) -> HeldTokens:
    """Tokens in the order of their positions, the last one at ``offset`` - 1; after ``keep`` ones some may be gone."""
    count = keys.shape[2]
    if count >= offset:
        return HeldTokens(0, [(offset, keys[:, :, :offset], values[:, :, :offset])], stored)
    spans = [(offset, keys[:, :, keep:], values[:, :, keep:])]
    if keep:
        spans.insert(0, (keep, keys[:, :, :keep], values[:, :, :keep]))
    return HeldTokens(offset - count + keep, spans, stored)
