"""Attention over a paged pool by native kernels (`src/attention_head.h`): K and V are read where they lie.

Queries, sums and results are float32 inside. Where the processor multiplies bfloat16 faster, queries and the softmax's weights
are rounded to it for a pool of bfloat16 (`src/dot_attention.h`). A row's result has the same bits whatever other rows come with
it, however its prompt is chunked, and however many threads compute it."""

from array import array
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch import Tensor

from kernels.attention.case import Attend
from kernels.cpu import library
from kernels.cpu.pages import result
from kernels.kv_parts import KVPart, ScaledLatents
from kernels.ops import AttentionMeta, KVLayer, ScaledKV
from kernels.torch.scaled_kv import as_floats

NUMBERS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""What a pool may have, as `src/api.cpp` numbers it."""
_MOST_SIZE: Final = 1024
"""Numbers of a head, so that a tile of keys stays in a core's cache."""


def attends_heads_of(size: int) -> bool:
    """Whether there are native kernels, for heads of so many numbers."""
    return library.native() is not None and fastest(size) is not None


def supports(kv_layer: KVLayer) -> bool:
    """Whether native kernels read such a pool. One of float8 is made floats first."""
    if isinstance(kv_layer, KVPart | ScaledLatents):
        return False
    is_known = isinstance(kv_layer, ScaledKV) or kv_layer.dtype in NUMBERS
    return is_known and fastest(kv_layer.shape[-1]) is not None


def native_first(otherwise: Attend) -> Attend:
    """Return `attend` for the layers that it supports, and `otherwise` for others; without native kernels only the latter."""

    def paged_attention(
        q: Tensor, kv_layer: KVLayer, meta: AttentionMeta, scale: float, window: int, soft_cap: float, sinks: Tensor | None
    ) -> Tensor:  # fmt: skip
        taken = attend if supports(kv_layer) else otherwise
        return taken(q, kv_layer, meta, scale, window, soft_cap, sinks)

    return paged_attention if library.native() is not None else otherwise


def attend(
    q: Tensor, kv_layer: KVLayer, meta: AttentionMeta, scale: float, window: int, soft_cap: float, sinks: Tensor | None,
    isa: library.Isa | None = None,
) -> Tensor:  # fmt: skip
    """`Ops.paged_attention`, for layers that `supports` allows. `isa` None: the fastest with which the head's size fits."""
    if isinstance(kv_layer, KVPart | ScaledLatents):
        raise _refused("a layer that has all of a pool's heads")
    if isinstance(kv_layer, ScaledKV) and kv_layer.data.dtype not in NUMBERS:
        kv_layer, meta = as_floats(kv_layer, meta, torch.float32)
    data, scales = _checked_pool(kv_layer)
    _, _, kv_heads, block_size, size = data.shape
    tokens, heads = q.shape[:2]
    if q.shape != (tokens, heads, size) or heads % kv_heads:
        raise _refused(f"queries (T, {kv_heads} heads or a multiple, {size}), not {tuple(q.shape)}")
    if sinks is not None and (sinks.shape != (heads,) or sinks.dtype != torch.float32):
        raise _refused(f"sinks ({heads},) of float32")
    if meta.query_starts[-1] != tokens:
        raise _refused(f"{meta.query_starts[-1]} queries, as the step says, not {tokens}")
    seqs = sequences_of(meta, data.shape[0], block_size)
    isa = fastest(size, data.dtype) if isa is None else isa
    if isa is None or size % _lanes(isa):
        raise _refused(f"heads that vectors divide, not of {size}")
    queries = q.float().contiguous()
    out = result(*queries.shape)
    own = None if sinks is None else sinks.contiguous()
    shape = heads, kv_heads, size
    pool = data.data_ptr(), None if scales is None else scales.data_ptr(), block_size
    ways = torch.tensor(meta.both_ways, dtype=torch.bool) if meta.both_ways else None
    sequences = len(meta.query_lens), seqs.query_starts, seqs.context_lens, seqs.tables
    library.loaded().baton_attend(
        isa, NUMBERS[data.dtype], queries.data_ptr(), out.data_ptr(), *shape, *pool, window, scale, soft_cap,
        None if own is None else own.data_ptr(), *sequences, None if ways is None else ways.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return out.to(q.dtype)


def _checked_pool(kv_layer: Tensor | ScaledKV) -> tuple[Tensor, Tensor | None]:
    """Pointers know no types and no bounds, so everything is checked here and in `sequences_of`."""
    data, scales = (kv_layer.data, kv_layer.scales) if isinstance(kv_layer, ScaledKV) else (kv_layer, None)
    known = (torch.int8,) if isinstance(kv_layer, ScaledKV) else (torch.float32, torch.bfloat16)
    if data.dim() != 5 or data.shape[1] != 2 or not data.is_contiguous() or data.dtype not in known:
        raise _refused(
            f"a contiguous pool (blocks, 2, heads, block_size, D) of {known}, not {tuple(data.shape)} of {data.dtype}"
        )
    if scales is not None and (
        scales.shape != data.shape[:-1] or scales.dtype != torch.float32 or not scales.is_contiguous()
    ):
        raise _refused("a contiguous float32 scale for each vector")
    return data, scales


@dataclass(frozen=True, slots=True)
class StepSequences:
    """Where the library reads what the sequences of a step are: addresses, which are valid while this object is kept."""

    query_starts: int
    context_lens: int
    tables: int
    kept: tuple["array[int]", ...]


def sequences_of(meta: AttentionMeta, num_blocks: int, block_size: int) -> StepSequences:
    """Return the step's sequences, looked at once a step. Raises ValueError for tables that are too short for their contexts, or
    name other blocks than a pool of `num_blocks` has."""
    key = "native sequences", num_blocks, block_size
    if (found := meta.cache.get(key)) is not None:
        return found
    tables, count = meta.block_tables, len(meta.query_lens)
    if not count == len(tables) == len(meta.context_lens) == len(meta.query_starts) - 1:
        raise _refused(f"a table and a context for each of {count} sequences")
    if not all(table.dtype == torch.int64 and table.is_contiguous() for table in tables):
        raise _refused("block tables in int64")
    kept = (
        array("q", meta.query_starts),
        array("q", meta.context_lens),
        array("q", [table.data_ptr() for table in tables]),
        array("q", [table.numel() for table in tables]),
    )
    starts, contexts, addresses, lens = (each.buffer_info()[0] for each in kept)
    checked = addresses, lens, starts, contexts, count, block_size, num_blocks
    if (bad := library.loaded().baton_check_tables(*checked)) < count:
        raise _refused(
            f"a context of at least {meta.query_lens[bad]} tokens, with all of its blocks of {block_size} below {num_blocks}: "
            f"not {meta.context_lens[bad]} tokens in {tables[bad].numel()} blocks"
        )
    found = meta.cache[key] = StepSequences(starts, contexts, addresses, kept)
    return found


@cache
def fastest(size: int, kept: torch.dtype = torch.float32) -> library.Isa | None:
    """The instruction set for heads of that many numbers, in a pool of `kept`."""
    last = library.fastest_of_bfloat16() if kept == torch.bfloat16 else library.fastest_exact()
    fitting = [isa for isa in library.allowed_sets() if isa <= (last or 0) and size % _lanes(isa) == 0]
    return fitting[-1] if fitting and size <= _MOST_SIZE else None


@cache
def _lanes(isa: library.Isa) -> int:
    return library.loaded().baton_lanes(isa)


def _refused(wanted: str) -> ValueError:
    return ValueError(f"native attention takes {wanted}")
