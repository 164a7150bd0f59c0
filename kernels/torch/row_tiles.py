"""Row-wise operations whose result for a row has the same bits whatever other rows come with it.

Libraries choose how to add up by the number of rows, and a row's place among them may decide which instructions compute it. Here
an operation only sees tiles of a few heights: the tallest in which every place gives a row the same bits, and the lower ones that
give these bits, too. The heights are found by a trial, once for each operation and shape."""

from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from torch import Tensor

Rowwise = Callable[..., Sequence[Tensor]]
"""Tensors of h rows each -> tensors of h rows each; in exact arithmetic a row of the results would depend on that row alone."""

_HEIGHTS = (64, 16, 4, 1)
_NUM_PROBES = _HEIGHTS[0]
_SHIFTS = (0, 1, 2, 3, 5, 7, 8, 11, 13, 16, 32, 48)


class RowTiles:
    """Remembers which heights agree. An object serves one thread."""

    def __init__(self) -> None:
        self._heights: dict[Hashable, tuple[int, ...]] = {}

    def run(
        self, key: Hashable, operation: Rowwise, *rows: Tensor, trial: Callable[[], Rowwise] | None = None
    ) -> tuple[Tensor, ...]:
        """Run `operation` on tensors of T rows each, tile by tile. `key` names it and all that its way of computing may depend
        on, but for the shapes and dtypes of rows. `trial` is tried in its place, on random numbers from 0 to 255 where rows are
        integers."""
        if not len(rows[0]):
            return tuple(operation(*rows))
        whole = (key, *((x.shape[1:], x.dtype) for x in rows))
        if (heights := self._heights.get(whole)) is None:
            tried = operation if trial is None else trial()
            heights = self._heights[whole] = agreeing(tried, [_random(x) for x in rows])
        parts = [
            [out[: end - start] for out in operation(*(_tile(x, start, end, height) for x in rows))]
            for start, end, height in cuts(len(rows[0]), heights)
        ]
        return tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))

    def one(self, key: Hashable, operation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return self.run(key, lambda tile: (operation(tile),), x)[0]


def cuts(num_rows: int, heights: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Return (first row, end, height of the tile) of each tile; the last may be partly empty. `heights` descend. The rest goes
    into one tile when it fills more than a quarter of it: fewer tiles are worth some empty rows."""
    start = 0
    while start < num_rows:
        left = num_rows - start
        height = next((h for h in reversed(heights) if left <= h < 4 * left), None)
        height = height or next((h for h in heights if h <= left), heights[-1])
        yield start, min(start + height, num_rows), height
        start += height


def agreeing(operation: Rowwise, probes: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the tallest of the heights 64, 16, 4 and 1 that gives each of the 64 `probes` the same bits in all places, and the
    heights below it that give these bits, too."""
    heights: list[int] = []
    wanted: list[Tensor] = []
    for height in _HEIGHTS:
        results = [_shifted(operation, probes, height, shift) for shift in _SHIFTS if shift < height]
        if all(_equal(result, wanted or results[0]) for result in results):
            wanted = wanted or results[0]
            heights.append(height)
    return tuple(heights)


def _shifted(operation: Rowwise, probes: Sequence[Tensor], height: int, shift: int) -> list[Tensor]:
    """Return the probes' results when each stands `shift` places further."""
    moved = [x.roll(shift, 0).split(height) for x in probes]
    tiles = [operation(*(tile.clone() for tile in tiles)) for tiles in zip(*moved, strict=True)]
    return [torch.cat(pieces).roll(-shift, 0) for pieces in zip(*tiles, strict=True)]


def _equal(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def _tile(x: Tensor, start: int, end: int, height: int) -> Tensor:
    """Return a copy, so that its alignment is always the same."""
    if end - start == height:
        return x[start:end].clone(memory_format=torch.contiguous_format)
    tile = x.new_zeros((height, *x.shape[1:]))
    tile[: end - start] = x[start:end]
    return tile


def _random(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (_NUM_PROBES, *like.shape[1:])
    if like.is_floating_point():
        return torch.randn(shape, generator=generator).to(like.dtype)
    return torch.randint(0, 256, shape, generator=generator, dtype=like.dtype)
