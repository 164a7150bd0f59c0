"""Blocks of a paged cache, all layers at once: gathered for a transfer, scattered after it, or copied between pools.

Memory-bound. Floor: every block is read once and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = 4096
"""Words of 4 bytes that one program moves."""


@triton.jit
def _copy_kernel(
    src, dst, src_ids, dst_ids, src_layer, dst_layer, block_words,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Program (words, block, layer). Without ids, blocks are taken or put one behind another."""
    index, layer = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    source = tl.load(src_ids + index) if GATHER else index
    target = tl.load(dst_ids + index) if SCATTER else index
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    mask = word < block_words
    values = tl.load(src + layer * src_layer + source * block_words + word, mask)
    tl.store(dst + layer * dst_layer + target * block_words + word, values, mask)


def copy_blocks(src: Tensor, dst: Tensor, src_ids: Tensor | None, dst_ids: Tensor | None) -> None:
    """Blocks `src_ids` of src (layers, blocks, ...) to `dst_ids` of dst, so shaped too; (N,) int64, or None: the first N.

    Blocks are contiguous, of a multiple of 4 bytes; no target is named twice, or is a source in the same memory."""
    count = next(len(ids) for ids in (src_ids, dst_ids) if ids is not None)
    if not count:
        return
    from_words, to_words = _as_words(src), _as_words(dst)
    assert from_words.shape[2] == to_words.shape[2]
    block_words = from_words.shape[2]
    words = min(_WORDS, triton.next_power_of_2(block_words))
    _copy_kernel[(triton.cdiv(block_words, words), count, src.shape[0])](
        from_words, to_words, src_ids, dst_ids, from_words.stride(0), to_words.stride(0), block_words,
        GATHER=src_ids is not None, SCATTER=dst_ids is not None, WORDS=words, num_warps=8,
    )  # fmt: skip


def _as_words(pool: Tensor) -> Tensor:
    """(layers, blocks, words) int32"""
    assert pool[0].is_contiguous()
    return pool.flatten(2).view(torch.int32)
