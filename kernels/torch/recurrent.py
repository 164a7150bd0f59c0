"""What all layers with a recurrent state share: where the states lie, a short convolution, and how a ragged batch is scanned.

A step with one token of a sequence is one update of its state. Longer pieces are computed in chunks. Invariant: a state that is
written has taken in known tokens alone. Draft tokens are computed from it, and taken in when it is known which were right."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.ops import AttentionMeta
from kernels.state_layer import Convolution, StateLayer
from kernels.states import FLOAT_BYTES, StateShape

CHUNK_TOKENS = 64
"""The number of tokens between which products are computed, before the state behind them is."""
Rule = Callable[..., tuple[Tensor, Tensor]]
"""(matrices, parts ...) -> results like the parts' values, and the matrices behind them."""
Held = tuple[Tensor, Tensor]
"""What `read_states` returns."""
Scan = Callable[[Sequence[Tensor], Held, AttentionMeta], tuple[Tensor, Held]]
"""(rows, (T, ..) each, what the sequences hold, meta) -> the rows' results (T, ..), and what is held behind them."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Neighbouring rows of some of a step's sequences."""

    seqs: Tensor
    rows: Tensor
    meta: AttentionMeta


def over_states(
    scan: Scan, rows: Sequence[Tensor], kv_layer: Tensor, meta: AttentionMeta, layer: StateLayer
) -> Tensor:
    """Compute `rows`, (T, ..) each, from the sequences' states on, and write the states behind them: behind known tokens, where
    there are draft tokens. What those need to be taken in is kept."""
    assert meta.states is not None
    held = read_states(kv_layer, meta, layer)
    if not meta.states.num_drafts:
        out, held = scan(rows, held, meta)
        write_states(kv_layer, meta, layer, *held)
        return out
    known, drafted = _parts(meta, meta.states.num_drafts)
    first, held = scan([each[known.rows] for each in rows], held, known.meta)
    write_states(kv_layer, meta, layer, *held)
    drafts = [each[drafted.rows] for each in rows]

    def take_in(right: AttentionMeta, taken: Tensor) -> None:
        over_states(scan, [each[taken] for each in drafts], kv_layer, right, layer)

    meta.states.kept.append(take_in)
    inputs, matrices = held
    more, _ = scan(drafts, (inputs[drafted.seqs], matrices[drafted.seqs]), drafted.meta)
    out = first.new_empty(len(rows[0]), *first.shape[1:])
    out[known.rows], out[drafted.rows] = first, more
    return out


def _parts(meta: AttentionMeta, num_drafts: Sequence[int]) -> tuple[_Part, _Part]:
    """Return the rows of known tokens, and those of draft tokens."""
    if (found := meta.cache.get("drafts")) is None:
        lens = [own - drafts for own, drafts in zip(meta.query_lens, num_drafts, strict=True)]
        ends = [start + own for start, own in zip(meta.query_starts, lens, strict=False)]
        device = meta.states.blocks.device if meta.states is not None else None
        found = _part(meta.query_starts, lens, device), _part(ends, num_drafts, device)
        meta.cache["drafts"] = found
    return found


def _part(starts: Sequence[int], lens: Sequence[int], device: torch.device | None) -> _Part:
    seqs = [seq for seq, count in enumerate(lens) if count]
    rows = [starts[seq] + at for seq in seqs for at in range(lens[seq])]
    meta = AttentionMeta.of_states([lens[seq] for seq in seqs])
    return _Part(torch.tensor(seqs, device=device), torch.tensor(rows, device=device), meta)


def read_states(kv_layer: Tensor, meta: AttentionMeta, layer: StateLayer) -> tuple[Tensor, Tensor]:
    """Return the convolution's last inputs (B, channels, kernel - 1) and the matrices (B, value heads, key_dim, value_dim), both
    float32; zeros for the sequences that begin."""
    assert meta.states is not None
    part, num_parts = layer.part, _num_parts(layer)
    stored = kv_layer.permute(0, 3, 2, 1, 4)[_slots(kv_layer, meta, layer)]
    held = stored.flatten(1).view(torch.float32).unflatten(1, (num_parts, -1))[..., : part.num_floats]
    held = torch.where(meta.states.begins[:, None, None], 0.0, held)
    shape = len(held), layer.shape.num_value_heads, part.key_dim, part.value_dim
    matrices = held[..., part.conv_floats :].reshape(shape)
    inputs = held[..., : part.conv_floats].unflatten(2, (part.conv_channels, -1))
    pieces = inputs.split(_sizes(part, layer), 2)
    # A key head of several parts is read from the first of them.
    times = _parts_of_key_head(layer)
    own = [
        piece[:, ::times] if kind == "key" else piece
        for kind, piece in zip(layer.channels, pieces, strict=True)
    ]
    return torch.cat([piece.flatten(1, 2) for piece in own], 1), matrices


def write_states(
    kv_layer: Tensor, meta: AttentionMeta, layer: StateLayer, inputs: Tensor, matrices: Tensor
) -> None:
    """Take both as `read_states` returns them; the matrices' heads may have any shape."""
    num_parts, times = _num_parts(layer), _parts_of_key_head(layer)
    pieces = [
        piece.unflatten(1, (num_parts // times, -1)).repeat_interleave(times, 1)
        if kind == "key"
        else piece.unflatten(1, (num_parts, -1))
        for kind, piece in zip(layer.channels, inputs.split(_sizes(layer.shape, layer), 1), strict=True)
    ]
    num_matrices = layer.part.key_dim * layer.part.value_size
    held = [torch.cat(pieces, 2).flatten(2), matrices.reshape(len(matrices), num_parts, num_matrices)]
    slots = _slots(kv_layer, meta, layer)
    slot = kv_layer[0, :, :, 0]
    num_floats = layer.place.num_slots * slot.nbytes // (FLOAT_BYTES * num_parts)
    surplus = num_floats - layer.part.num_floats
    filled = torch.cat([*held, matrices.new_zeros(len(matrices), num_parts, surplus)], 2).flatten(1)
    shape = len(filled), len(slot[0]), layer.place.num_slots, len(slot), slot.shape[2]
    kv_layer.permute(0, 3, 2, 1, 4)[slots] = filled.view(kv_layer.dtype).view(shape)


def _num_parts(layer: StateLayer) -> int:
    return layer.shape.num_value_heads // layer.part.num_value_heads


def _parts_of_key_head(layer: StateLayer) -> int:
    """Return in how many parts each key head is."""
    num_parts = _num_parts(layer)
    return num_parts // min(num_parts, layer.shape.num_key_heads)


def _sizes(shape: StateShape, layer: StateLayer) -> list[int]:
    return [shape.key_size if kind == "key" else shape.value_size for kind in layer.channels]


def _slots(kv_layer: Tensor, meta: AttentionMeta, layer: StateLayer) -> tuple[Tensor, Tensor, Tensor]:
    """Return block, offset and head of what each sequence's state lies in, in its order: each is (B, heads, num_slots) when it is
    spread out."""
    assert meta.states is not None
    if (found := meta.cache.get(layer.place)) is None:
        blocks, size = meta.states.blocks, kv_layer.shape[3]
        first = layer.place.first_slot
        slots = torch.arange(first, first + layer.place.num_slots, device=blocks.device)
        heads = torch.arange(kv_layer.shape[2], device=blocks.device)[:, None]
        found = blocks[:, None, slots // size], slots % size, heads
        meta.cache[layer.place] = found
    return found


def convolve(x: Tensor, conv: Convolution, held: Tensor, meta: AttentionMeta) -> tuple[Tensor, Tensor]:
    """Return `filtered` with its results' silu."""
    out, inputs = filtered(x, conv, held, meta)
    return F.silu(out), inputs


def filtered(x: Tensor, conv: Convolution, held: Tensor, meta: AttentionMeta) -> tuple[Tensor, Tensor]:
    """(x (T, channels), conv, last inputs (B, channels, kernel - 1), meta) -> what each channel's filter makes of it (T,
    channels), and the last inputs behind the step, as `held` has them."""
    before = conv.weight.shape[1] - 1
    current, first, last = _rows(meta, before, x.device)
    padded = x.new_empty(len(x) + before * len(held), x.shape[1])
    padded[current + before] = x
    padded[first] = held.mT.flatten(0, 1)
    out = padded[current] * conv.weight[:, 0]
    for tap in range(1, before + 1):
        out = torch.addcmul(out, padded[current + tap], conv.weight[:, tap])
    inputs = padded[last].unflatten(0, (-1, before)).mT
    return out if conv.bias is None else out + conv.bias, inputs


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
