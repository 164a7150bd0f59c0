"""What all layers with a recurrent state share: where the states lie, a short convolution, and how a ragged batch is scanned.

A step with one token of a sequence is one update of its state. Longer pieces are computed in chunks."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.ops import AttentionMeta, Convolution, StateLayer

CHUNK_TOKENS = 64
"""The number of tokens between which products are computed, before the state behind them is."""
Rule = Callable[..., tuple[Tensor, Tensor]]
"""(matrices, parts ...) -> results like the parts' values, and the matrices behind them."""


def read_states(kv_layer: Tensor, meta: AttentionMeta, layer: StateLayer) -> Tensor:
    """(B, num_floats) float32; zeros for the sequences that begin."""
    assert meta.states is not None
    blocks, offsets = _slots(kv_layer, meta, layer)
    stored = kv_layer.permute(0, 3, 1, 2, 4)[blocks, offsets]
    held = stored.flatten(1).view(torch.float32)[:, : layer.shape.num_floats]
    return torch.where(meta.states.begins[:, None], 0.0, held)


def write_states(kv_layer: Tensor, meta: AttentionMeta, layer: StateLayer, held: Tensor) -> None:
    """`held`: (B, num_floats) float32"""
    blocks, offsets = _slots(kv_layer, meta, layer)
    slot = kv_layer[0, :, :, 0]
    num_floats = layer.place.num_slots * slot.nbytes // held.element_size()
    filled = F.pad(held, (0, num_floats - held.shape[1])).view(kv_layer.dtype)
    kv_layer.permute(0, 3, 1, 2, 4)[blocks, offsets] = filled.view(*offsets.shape, *slot.shape)


def _slots(kv_layer: Tensor, meta: AttentionMeta, layer: StateLayer) -> tuple[Tensor, Tensor]:
    """Return block and offset of each slot of each sequence's state, (B, num_slots) each."""
    assert meta.states is not None
    if (found := meta.cache.get(layer.place)) is None:
        blocks, size = meta.states.blocks, kv_layer.shape[3]
        first = layer.place.first_slot
        slots = torch.arange(first, first + layer.place.num_slots, device=blocks.device)
        found = blocks[:, slots // size], (slots % size).expand(len(blocks), -1)
        meta.cache[layer.place] = found
    return found


def convolve(x: Tensor, conv: Convolution, held: Tensor, meta: AttentionMeta) -> tuple[Tensor, Tensor]:
    """(x (T, channels), conv, last inputs (B, channels * (kernel - 1)), meta) -> silu of what each channel's filter makes of it
    (T, channels), and the last inputs behind the step, as `held` has them."""
    before = conv.weight.shape[1] - 1
    current, first, last = _rows(meta, before, x.device)
    padded = x.new_empty(len(x) + before * len(held), x.shape[1])
    padded[current + before] = x
    padded[first] = held.unflatten(1, (-1, before)).mT.flatten(0, 1)
    out = padded[current] * conv.weight[:, 0]
    for tap in range(1, before + 1):
        out = torch.addcmul(out, padded[current + tap], conv.weight[:, tap])
    inputs = padded[last].unflatten(0, (-1, before)).mT.flatten(1)
    return F.silu(out if conv.bias is None else out + conv.bias), inputs


def _rows(meta: AttentionMeta, before: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows of a tensor in which `before` rows stand before each sequence's: the first that each token's filter sees (T,),
    and those before each sequence's rows and its last ones (B * before,)."""
    if (found := meta.cache.get("conv_rows")) is None:
        lens = torch.tensor(meta.query_lens)
        count = torch.arange(len(lens))
        current = torch.arange(int(lens.sum())) + before * torch.repeat_interleave(count, lens)
        begins = lens.cumsum(0) - lens + before * count
        taps = torch.arange(before)
        first, last = ((rows[:, None] + taps).flatten() for rows in (begins, begins + lens))
        found = meta.cache["conv_rows"] = current.to(device), first.to(device), last.to(device)
    return found


def scanned(
    meta: AttentionMeta, matrices: Tensor, parts: tuple[Tensor, ...], update: Rule, in_chunks: Rule
) -> tuple[Tensor, Tensor]:
    """Scan each sequence's rows from its matrices (B, ..) on. `parts`, (T, ..) each, are queries, keys, values and what else the
    rule takes. `update` takes one row of each of some sequences, and `in_chunks` several rows of one. Returns the rows' results,
    like the values, and the matrices behind them."""
    lens, starts = meta.query_lens, meta.query_starts
    if max(lens) == 1:
        return update(matrices, *parts)
    out, behind = torch.empty_like(parts[2]), torch.empty_like(matrices)
    single = [index for index, length in enumerate(lens) if length == 1]
    if single:
        rows = [starts[index] for index in single]
        out[rows], behind[single] = update(matrices[single], *(part[rows] for part in parts))
    for index, length in enumerate(lens):
        if length > 1:
            rows = slice(starts[index], starts[index + 1])
            out[rows], behind[index] = in_chunks(matrices[index], *(part[rows] for part in parts))
    return out, behind
