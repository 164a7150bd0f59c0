"""Which tiles a step's attention is cut into, and how many programs share a context: chosen by shape, once a step.

Tile sizes follow from what a program may keep: accumulator and queries in registers (BLOCK_M x D), keys and values of a few
iterations in shared memory (2 x stages x BLOCK_N x D)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch

from kernels.ops import AttentionMeta
from kernels.triton.platform import INTERPRETED, capability, cdiv, next_power_of_2, num_programs
from kernels.triton.tiles import Items, Splits, StepLens, Tiles, cut, items_of, uploaded

DECODE_ROWS = 16
"""The fewest rows that a tensor core's product takes."""
_PREFILL_ROWS = 128
INVARIANT_ROWS = 64
"""The fewest rows that Hopper's products take. With so many, decode still waits for memory and not for them."""
_MIN_SPLIT_TOKENS = 64
"""With fewer tokens than this, reducing the splits costs more than it gains."""
FIXED = "triton fixed step"
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
    latents: bool = False
    """Values are keys, too."""

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


@dataclass(frozen=True, slots=True)
class LaunchPart:
    """One launch: tiles of similar sequences."""

    config: AttentionConfig
    items: Items


def plan(
    meta: AttentionMeta, shape: AttentionShape, window: int, device: torch.device
) -> Sequence[LaunchPart]:
    """Return the plan, which is kept in `meta.cache`: it is the same in all layers of one shape and window. For fixed steps a
    FixedStep has the plans."""
    if meta.is_fixed:
        return meta.cache[FIXED].parts(shape, window)
    key = ("triton attention", shape, window)
    if (parts := meta.cache.get(key)) is None:
        parts = meta.cache[key] = _plan(meta, shape, window, device)
    return parts


def _plan(meta: AttentionMeta, shape: AttentionShape, window: int, device: torch.device) -> list[LaunchPart]:
    lens = StepLens.of(meta.query_lens, meta.context_lens, meta.both_ways)
    parts, arrays = list[tuple[AttentionConfig, Tiles]](), [block_table(meta, shape.block_size)]
    for part, seqs in parts_of(lens, classes(shape, device)):
        if len(seqs):
            tiles = cut(lens, seqs, part.tokens_per_tile, window, part.config.block_n)
            arrays += items_of(tiles, part.split(tiles, shape, device))
            parts.append((part.config, tiles))
    table, *sent = uploaded(arrays, device)
    return [
        LaunchPart(
            config,
            Items(
                items=items,
                split_tiles=split_tiles,
                table=table,
                num_places=int(split_tiles_of_host[:, 1].sum()),
                most_tokens=int(tiles.counts.max()),
            ),
        )
        for (config, tiles), items, split_tiles, split_tiles_of_host in zip(
            parts, sent[::2], sent[1::2], arrays[2::2], strict=True
        )
    ]


@dataclass(frozen=True, slots=True)
class TileClass:
    """Sequences that are cut into tiles of one configuration."""

    config: AttentionConfig
    fewest: int
    """Sequences of fewer query tokens are of another class."""
    per_processor: int
    """Programs that run on a multiprocessor at once."""
    most_rounds: int
    """How often the device may be occupied by programs of split tiles."""

    @property
    def tokens_per_tile(self) -> int:
        return self.config.block_m // self.config.heads

    def split(self, tiles: Tiles, shape: AttentionShape, device: torch.device) -> Splits:
        if shape.split_tokens:
            return split_at_multiples(tiles, shape.split_tokens)
        return split_all(tiles, self.occupying(shape, device), self.most_rounds, self.config)

    def occupying(self, shape: AttentionShape, device: torch.device) -> int:
        """Return how many items the device runs at once."""
        return max(1, num_programs(device, self.per_processor) // self.config.num_head_blocks(shape))

    def most_further(self, shape: AttentionShape, device: torch.device) -> int:
        """Return how many items more than tiles there are, at most."""
        return self.most_rounds * self.occupying(shape, device)


def classes(shape: AttentionShape, device: torch.device) -> list[TileClass]:
    """Return the classes of a step's sequences, those of the fewest tokens first."""
    if shape.split_tokens:
        return [TileClass(config_for(shape, INVARIANT_ROWS, device), 1, 0, 0)]
    low = TileClass(config_for(shape, DECODE_ROWS, device), 1, 4, 2)
    prefill = config_for(shape, _PREFILL_ROWS, device)
    # Results of tall tiles are as large as what is read for them, so none is split that need not be.
    tall = TileClass(prefill, low.tokens_per_tile + 1, 1, 1)
    return [low] if low.config == tall.config else [low, tall]


def parts_of(lens: StepLens, among: Sequence[TileClass]) -> Iterator[tuple[TileClass, np.ndarray]]:
    """Yield which sequences are of each class."""
    if len(among) == 1:
        yield among[0], np.arange(len(lens.queries), dtype=np.int32)
        return
    for each, behind in zip_longest(among, among[1:]):
        is_own = lens.queries >= each.fewest
        if behind is not None:
            is_own &= lens.queries < behind.fewest
        yield each, np.flatnonzero(is_own).astype(np.int32)


def split_all(tiles: Tiles, occupying: int, most_rounds: int, config: AttentionConfig) -> Splits:
    """Split what tiles see equally, such that all programs run at once, or, where these would be too many, such that the device
    is occupied up to `most_rounds` times, by shorter ones. There are at most `most_rounds * occupying` items more than tiles."""
    spans, block_n = tiles.ends - tiles.begins, config.block_n
    total = int(spans.sum(dtype=np.int64))
    for places in range(occupying, (most_rounds + 1) * occupying, occupying):
        tokens = max(smallest_split(config), cdiv(cdiv(total, places), block_n) * block_n)
        counts = np.maximum(-(-spans // tokens), 1)
        if counts.sum() <= occupying:
            break
    each = -(-spans // counts)
    return Splits(
        tiles.begins, np.zeros_like(counts), counts, -(-each // block_n) * block_n, all_reduced=False
    )


def split_at_multiples(tiles: Tiles, tokens: int) -> Splits:
    """Split what tiles see at multiples of `tokens` of the context."""
    firsts = tiles.begins // tokens
    counts = np.maximum(-(-tiles.ends // tokens) - firsts, 1)
    return Splits(np.zeros_like(firsts), firsts, counts, np.full_like(firsts, tokens), all_reduced=True)


def config_for(shape: AttentionShape, rows: int, device: torch.device) -> AttentionConfig:
    """Return the configuration for tiles of at least `rows` rows, less where that is too much for heads of this size.

    Block ids are loaded ahead of the keys and values whose places they say, and take stages too: 3 of them make one buffer, 5
    make two; where products are asynchronous, they make one more. Sizes are those that were fastest on an H200."""
    wide, hopper, decode = shape.head_dim > 128, capability(device) >= 90, rows <= DECODE_ROWS
    # What is made of 8 bits takes the registers of a larger tile.
    is_stored = shape.latents and shape.quantised
    heads = min(shape.group, 16 if is_stored else 64)
    if INTERPRETED:
        block_m, block_n, warps, stages = min(rows, 32), 16, 1, 1
    elif shape.dtype == torch.float32:
        block_m, block_n, warps, stages = min(rows, 32), 32, 4, 2
    elif shape.head_dim > 256:
        # An accumulator as wide needs all registers. Latents are keys and values in one tile.
        block_m = max(min(rows, 16 if is_stored else 64), next_power_of_2(heads))
        is_long = shape.latents and not is_stored and block_m == 64 and capability(device) == 90
        block_n, warps, stages = 64 if is_long else 16, 8, 3
    elif decode and wide:
        block_m, block_n, warps, stages = rows, 32, 4, 5
    elif decode and shape.quantised and hopper:
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


def block_table(meta: AttentionMeta, block_size: int) -> np.ndarray:
    """Return (B, widest) block ids, which are those of all plans of the step."""
    key = ("block table", block_size)
    if (table := meta.cache.get(key)) is None:
        widest = max(-(-context // block_size) for context in meta.context_lens)
        table = meta.cache[key] = np.zeros((len(meta.block_tables), widest), np.int32)
        for row, ids in zip(table, meta.block_tables, strict=True):
            known = ids.numpy()[:widest]
            row[: len(known)] = known
    return table
