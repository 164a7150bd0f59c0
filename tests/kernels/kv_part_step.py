"""Layers that have a part of a pool's heads, for tests of all implementations."""

from collections.abc import Callable
from dataclasses import replace

import torch

from kernels.attention.case import Attend
from kernels.head_places import HeadPlaces
from kernels.kv_parts import KVPart
from kernels.ops import AttentionMeta, KVLayer
from tests.kernels.paged_step import make_step

PLACES = [
    HeadPlaces(0, 2, 1),
    HeadPlaces(1, 2, 1),
    HeadPlaces(0, 2, 2),
    HeadPlaces(2, 4, 2),
    HeadPlaces(3, 6, 3),
]
"""Halves of a pool's heads; vectors of two and three pieces, of the first and of later parts."""
LENS = [(1, 30), (1, 3), (7, 19), (40, 61), (1, 61)]
Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, KVLayer, AttentionMeta], torch.Tensor]
"""(qkv, cosines, sines, KV, meta) -> queries"""


def in_part(layer: torch.Tensor, places: HeadPlaces) -> KVPart:
    """Return a layer's KV in a pool that is NaN elsewhere."""
    num_blocks, planes, heads, block_size, size = layer.shape
    shape = num_blocks, planes, heads * places.step, block_size, size // places.width
    part = KVPart(torch.full(shape, torch.nan, dtype=layer.dtype, device=layer.device), places)
    pieces = layer.unflatten(4, (places.width, -1)).transpose(3, 4).flatten(2, 3)
    part.data[:, :, part.heads.to(layer.device)] = pieces
    assert part.shape == layer.shape
    return part


def check_attention(attend: Attend, places: HeadPlaces, window: int, device: torch.device) -> None:
    """Attend to the same keys and values in a pool of their own, and as a part of another."""
    step = make_step(LENS, heads=(4, 2), head_dim=24, device=device)
    options = 0.7, window, 0.0, None
    want = attend(step.q, step.kv_layer, replace(step.meta, cache={}), *options)
    got = attend(step.q, in_part(step.kv_layer, places), step.meta, *options)
    assert not want.isnan().any()
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)
    # The plan of a step is not that of a layer of other places.
    others = in_part(step.kv_layer * 2, HeadPlaces(0, 7, 1))
    assert attend(step.q, others, step.meta, *options).isfinite().all()


def check_writing(write: Write, places: HeadPlaces, device: torch.device) -> None:
    """Write keys and values where a part has them, and nothing where it has none."""
    step = make_step(LENS, heads=(4, 2), head_dim=24, device=device)
    num_rows = len(step.q)
    slots = torch.randperm(len(step.kv_layer) * 4)[:num_rows].to(device)
    meta = replace(step.meta, slots=slots)
    qkv = torch.randn(num_rows, 8 * 24).to(device)
    cos, sin = (
        function(torch.randn(num_rows, 12)).repeat(1, 2).to(device) for function in (torch.cos, torch.sin)
    )
    whole = torch.full_like(step.kv_layer, 5.0)
    part = in_part(whole, places)
    is_own = ~part.data.isnan()
    want = write(qkv, cos, sin, whole, meta)
    got = write(qkv, cos, sin, part, replace(meta, cache={}))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(part.blocks(torch.arange(len(whole), device=device)), whole)
    assert torch.equal(~part.data.isnan(), is_own)
    assert (whole != 5.0).any()
