"""Attention within chunks of a text: a token attends to those of its own chunk, up to itself.

No implementation of `Ops.paged_attention` knows chunks. A sequence's chunks are sequences of their own to it: keys are rotated
before they are stored, and what is left of positions is which keys a query sees."""

from dataclasses import replace
from itertools import accumulate

from torch import Tensor

from kernels.ops import AttentionMeta


def chunked(meta: AttentionMeta, chunk_tokens: int, block_size: int) -> AttentionMeta:
    """Return the step with each sequence cut where a chunk ends, and each piece's context beginning where its chunk does. It is
    kept in `meta.cache`. `chunk_tokens` is a multiple of `block_size`."""
    key = ("chunks", chunk_tokens)
    if key not in meta.cache:
        meta.cache[key] = _cut(meta, chunk_tokens, block_size)
    return meta.cache[key]


def _cut(meta: AttentionMeta, chunk_tokens: int, block_size: int) -> AttentionMeta:
    assert not meta.is_fixed, "the lengths of a captured step are not known here"
    assert not meta.both_ways, "chunks are of text alone"
    query_lens: list[int] = []
    context_lens: list[int] = []
    tables: list[Tensor] = []
    for query_len, context_len, table in zip(
        meta.query_lens, meta.context_lens, meta.block_tables, strict=True
    ):
        at = context_len - query_len
        while at < context_len:
            begin = at - at % chunk_tokens
            end = min(begin + chunk_tokens, context_len)
            query_lens.append(end - at)
            context_lens.append(end - begin)
            tables.append(table[begin // block_size :])
            at = end
    return replace(
        meta,
        query_starts=tuple(accumulate(query_lens, initial=0)),
        query_lens=tuple(query_lens),
        context_lens=tuple(context_lens),
        block_tables=tuple(tables),
        cache={},
        states=None,
    )
