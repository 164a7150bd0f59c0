"""The operations on a CPU, with the same bits for a token whatever it is batched with and however its prompt is chunked.

Operations that round each element once by itself (sums of two, products, copies) are so anyway, and so are products with packed
matrices; all others go by tiles of rows: in float32, or tried with numbers that show every difference in how they are added up,
of which bfloat16 would hide most."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.cpu.attention import native_first
from kernels.cpu.library import native
from kernels.cpu.linear import Layout, packed
from kernels.cpu.prepacked import NARROW, WeightFormat, in_panels, kept, look_up, pack, pack_experts
from kernels.cpu.sampling import with_native_sampling
from kernels.ops import ExpertWeights, Ops
from kernels.packed import LinearWeight, Prepacked, Weight, as_float
from kernels.rounding import Activations
from kernels.routing import Routing
from kernels.torch import reference
from kernels.torch.experts import experts, route, top_stable
from kernels.torch.invariant_attention import InvariantAttention, InvariantLatentAttention
from kernels.torch.invariant_token_index import InvariantTokenIndex
from kernels.torch.row_tiles import RowTiles


def invariant_ops(weights: WeightFormat = "full") -> Ops:
    """Return the operations over matrices that are kept as `weights` says, for one model on one thread."""
    tiles = RowTiles()
    index = InvariantTokenIndex(tiles)
    linear, rms_norm = partial(_linear, tiles), partial(_rms_norm, tiles)
    return replace(
        with_native_sampling(reference.reference_ops()),
        rms_norm=rms_norm,
        add_rms_norm=partial(reference.add_rms_norm, rms_norm),
        silu_mul=partial(_by_rows, tiles, reference.silu_mul),
        gelu_tanh_mul=partial(_by_rows, tiles, reference.gelu_tanh_mul),
        clamped_swiglu=partial(_clamped_swiglu, tiles),
        pack=reference.as_stored if native() is None else partial(_pack, weights),
        look_up=partial(look_up, weights),
        pack_experts=pack_experts,
        keeps=kept(weights),
        linear=linear,
        by_rows=partial(_by_rows, tiles),
        rope_write_kv=partial(reference.rope_write_kv, rms_norm),
        paged_attention=native_first(InvariantAttention(tiles)),
        route=partial(_route, tiles),
        experts=partial(_experts, linear),
        latent_attention=InvariantLatentAttention(tiles),
        select_tokens=index.select_tokens,
        selected_attention=index.selected_attention,
    )


def _pack(weights: WeightFormat, weight: Weight, dtype: torch.dtype) -> LinearWeight:
    """As native kernels multiply it, also where a library's products of bfloat16 were faster: their order is nobody's promise."""
    if weights != "full":
        return pack(weights, weight, dtype)
    return in_panels(packed(as_float(weight, dtype), NARROW.get(dtype, Layout.FLOAT32)))


def _by_rows(tiles: RowTiles, operation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return tiles.one(operation, operation, x.float()).to(x.dtype)


def _rms_norm(tiles: RowTiles, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return tiles.one("rms_norm", lambda tile: reference.rms_norm(tile, weight, eps), x.float()).to(x.dtype)


def _clamped_swiglu(tiles: RowTiles, x: Tensor, alpha: float, limit: float) -> Tensor:
    return tiles.one("swiglu", lambda tile: reference.clamped_swiglu(tile, alpha, limit), x.float()).to(
        x.dtype
    )


def _linear(tiles: RowTiles, x: Activations, stored: LinearWeight, bias: Tensor | None) -> Tensor:
    assert isinstance(x, Tensor), "nothing is rounded here"
    if isinstance(stored, Prepacked):
        return stored.product(x, bias) if len(x) else x.new_empty(0, stored.shape[0])
    weight = as_float(stored, x.dtype)
    key = ("linear", weight.shape, weight.stride(), bias is None)

    def multiply(tile: Tensor) -> tuple[Tensor]:
        return (F.linear(tile, weight, bias),)

    return tiles.run(key, multiply, x, trial=lambda: _cancelling(weight, bias))[0]


def _cancelling(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], tuple[Tensor]]:
    """Return a product of that shape whose terms cancel, so that its result is only the rounding errors that their order has
    left. It takes the weight's memory once more while it is tried."""
    half = weight.shape[1] // 2
    generator = torch.Generator().manual_seed(2)
    order = torch.randperm(half, generator=generator)
    other = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype).zero_()
    other[:, :half].normal_(generator=generator)
    other[:, half : 2 * half] = other[:, order]
    no_bias = None if bias is None else torch.zeros_like(bias)

    def multiply(tile: Tensor) -> tuple[Tensor]:
        first = tile[:, :half]
        rest = tile.new_zeros(len(tile), weight.shape[1] - 2 * half)
        return (F.linear(torch.cat((first, -first[:, order], rest), 1), other, no_bias),)

    return multiply


def _route(
    tiles: RowTiles, logits: Tensor, choice_bias: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    def choose(tile: Tensor) -> tuple[Tensor, Tensor]:
        return route(tile, choice_bias, routing, top_stable)

    chosen, weights = tiles.run(("route", routing, choice_bias is None), choose, logits)
    return chosen, weights


def _experts(
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    x: Tensor,
    slots: Tensor,
    weights: Tensor,
    held: ExpertWeights,
    activate: Callable[[Tensor], Tensor],
) -> Tensor:
    return experts(x, slots, weights, held, activate, linear)
