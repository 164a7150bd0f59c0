"""Which tiles a step's attention is cut into, and how many programs share a context: chosen by shape, once a step.

Tile sizes follow from what a program may keep: accumulator and queries in registers (BLOCK_M x D), keys and values of a few
iterations in shared memory (2 x stages x BLOCK_N x D)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.ops import AttentionMeta
from kernels.triton.platform import INTERPRETED, capability, cdiv, next_power_of_2, num_programs
from kernels.triton.tiles import Items, Tiles, cut

DECODE_ROWS = 16
"""The fewest rows that a tensor core's product takes."""
_PREFILL_ROWS = 128
INVARIANT_ROWS = 64
"""The fewest rows that Hopper's products take. With so many, decode still waits for memory and not for them."""
_MIN_SPLIT_TOKENS = 64
"""With fewer tokens than this, reducing the splits costs more than it gains."""
PROGRAMS_PER_PROCESSOR = 4
FIXED = "triton fixed decode"
"""The name under which a fixed step's cache has its plans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What the tiles depend on, but for the step's lengths."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    quantised: bool = False
    """The cache, and not the queries."""
    split_tokens: int = 0
    """> 0: one shape of tiles for all sequences, contexts split at its multiples."""

    @property
    def group(self) -> int:
        """Heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    block_m: int
    block_n: int
    heads: int
    """The heads of one tile: the group's, or a part of them."""
    num_warps: int
    num_stages: int

    def num_head_blocks(self, shape: AttentionShape) -> int:
        return shape.num_kv_heads * cdiv(shape.group, self.heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextPart:
    """One launch: tiles of similar sequences."""

    tiles: Tiles
    config: AttentionConfig
    num_splits: int
    split_tokens: int
    in_parts: bool
    """Whether results are to be reduced: always, where bits must not depend on who else is in the batch."""
    items: Items | None = None
    """What programs do, where that is not known when they are launched. `num_splits` and `split_tokens` then mean nothing."""

    @property
    def num_items(self) -> int:
        return self.tiles.num_tiles * self.num_splits if self.items is None else self.items.splits.shape[0]

    def grid(self, head_blocks: int) -> tuple[int, int, int]:
        if self.items is None:
            return head_blocks, self.tiles.num_tiles, self.num_splits
        return head_blocks, self.num_items, 1


def plan(meta: AttentionMeta, shape: AttentionShape, window: int, device: torch.device) -> list[ContextPart]:
    """Return the plan, which is kept in `meta.cache`: it is the same in all layers of one shape and window. For fixed steps a
    FixedDecode has the plans."""
    if meta.is_fixed:
        return [meta.cache[FIXED].part(shape, window)]
    key = ("triton attention", shape, window)
    if (parts := meta.cache.get(key)) is None:
        parts = meta.cache[key] = _plan(meta, shape, window, device)
    return parts


def _plan(meta: AttentionMeta, shape: AttentionShape, window: int, device: torch.device) -> list[ContextPart]:
    everyone = range(len(meta.query_lens))
    if shape.split_tokens:
        return [_part(meta, everyone, config_for(shape, INVARIANT_ROWS, device), shape, window, device)]
    few = config_for(shape, DECODE_ROWS, device)
    short = [i for i in everyone if meta.query_lens[i] * few.heads <= few.block_m]
    long = [i for i in everyone if meta.query_lens[i] * few.heads > few.block_m]
    classes = ((short, few), (long, config_for(shape, _PREFILL_ROWS, device)))
    return [_part(meta, seqs, config, shape, window, device) for seqs, config in classes if seqs]


def config_for(shape: AttentionShape, rows: int, device: torch.device) -> AttentionConfig:
    """Return the configuration for tiles of at least `rows` rows, less where that is too much for heads of this size.

    Block ids are loaded ahead of the keys and values whose places they say, and take stages too: 3 of them make one buffer, 5
    make two; where products are asynchronous, they make one more. Sizes are those that were fastest on an H200."""
    wide, hopper, decode = shape.head_dim > 128, capability(device) >= 90, rows <= DECODE_ROWS
    heads = min(shape.group, 64)
    if INTERPRETED:
        block_m, block_n, warps, stages = min(rows, 32), 16, 1, 1
    elif shape.dtype == torch.float32:
        block_m, block_n, warps, stages = min(rows, 32), 32, 4, 2
    elif shape.head_dim > 256:
        # Latents: keys and values are one tile, and an accumulator as wide needs all registers.
        block_m = max(min(rows, 64), next_power_of_2(heads))
        block_n, warps, stages = 64 if block_m == 64 and capability(device) == 90 else 32, 8, 3
    elif decode and wide:
        block_m, block_n, warps, stages = rows, 32, 4, 5
    elif decode and shape.quantised and capability(device) == 90:
        block_m, block_n, warps, stages = rows, 32, 1, 5
    elif decode:
        block_m, block_n, warps, stages = rows, 64, 2, 5 if shape.quantised else 3
    elif wide:
        block_m, block_n, warps, stages = 64, 32, 8, 3
    elif rows == INVARIANT_ROWS:
        block_m, block_n, warps, stages = rows, 32, 4, 5
    else:
        block_n = 128 if hopper and not shape.quantised else 64
        block_m, warps, stages = rows, 8, 3 if hopper and shape.quantised else 5
    return AttentionConfig(
        block_m=max(block_m, next_power_of_2(heads)),
        block_n=block_n,
        heads=heads,
        num_warps=warps,
        num_stages=stages,
    )


def smallest_split(config: AttentionConfig) -> int:
    """Return the fewest tokens of a split."""
    return 2 * config.block_n if INTERPRETED else _MIN_SPLIT_TOKENS


def _part(
    meta: AttentionMeta,
    seqs: Sequence[int],
    config: AttentionConfig,
    shape: AttentionShape,
    window: int,
    device: torch.device,
) -> ContextPart:
    tiles = cut(meta, seqs, config.block_m // config.heads, window, shape.block_size, device)
    if shape.split_tokens:
        longest = max(meta.context_lens)
        return ContextPart(
            tiles=tiles,
            config=config,
            num_splits=cdiv(longest, shape.split_tokens),
            split_tokens=shape.split_tokens,
            in_parts=True,
        )
    programs = tiles.num_tiles * config.num_head_blocks(shape)
    wanted = cdiv(num_programs(device, PROGRAMS_PER_PROCESSOR), programs)
    num_splits = max(1, min(wanted, tiles.longest // smallest_split(config)))
    # A tile begins at a multiple of block_n, which may lie up to block_n - 1 tokens before what it sees.
    split_tokens = cdiv(cdiv(tiles.longest + config.block_n, num_splits), config.block_n) * config.block_n
    return ContextPart(
        tiles=tiles, config=config, num_splits=num_splits, split_tokens=split_tokens, in_parts=num_splits > 1
    )
