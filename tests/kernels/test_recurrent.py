"""Recurrent rules over a ragged batch and a paged state, against transformers' own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch.nn import functional as F
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from kernels.ops import AttentionMeta, StateBlocks
from kernels.state_layer import Convolution, StateLayer
from kernels.states import StatePlace, StateShape
from kernels.torch.gated_delta import gated_delta
from kernels.torch.state_space import state_space

SHAPE = StateShape(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=24, conv_kernel=4)
BLOCK, HEAD = 4, (2, 16)
"""Tokens of a block; K and V of a head of the pool, and their dimension."""
CPU = torch.device("cpu")
SKIP = torch.linspace(-1.0, 2.0, 4)
SPREAD = torch.linspace(0.0, 20.0, SHAPE.key_dim)
"""By how much faster each channel decays, where each does by itself."""

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Inputs (T, channels), and two numbers (T, value heads) for each head."""


@dataclass(frozen=True, slots=True)
class Kind:
    ours: Callable[[Rows, torch.Tensor, AttentionMeta, StateLayer], torch.Tensor]
    theirs: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """(inputs behind the convolution, and the two numbers), one sequence from its beginning."""
    channels: tuple[Literal["key", "value"], ...]


def delta_by_transformers(mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    q, k, v = mixed.split((SHAPE.key_size, SHAPE.key_size, SHAPE.value_size), 1)
    q, k = (part.reshape(1, len(mixed), SHAPE.num_key_heads, SHAPE.key_dim) for part in (q, k))
    v = v.reshape(1, len(mixed), SHAPE.num_value_heads, SHAPE.value_dim)
    out, _ = torch_recurrent_gated_delta_rule(
        q, k, v, g=decay[None], beta=beta[None], use_qk_l2norm_in_kernel=True
    )
    return out[0]


def channels_by_transformers(mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    q, k, v = mixed.split((SHAPE.key_size, SHAPE.key_size, SHAPE.value_size), 1)
    q, k = (part.reshape(1, len(mixed), SHAPE.num_key_heads, SHAPE.key_dim) for part in (q, k))
    q, k = (part.repeat_interleave(SHAPE.num_value_heads // SHAPE.num_key_heads, 2) for part in (q, k))
    out, _ = recurrent_kimi_delta_attention(
        q,
        k,
        v.reshape(1, len(mixed), SHAPE.num_value_heads, SHAPE.value_dim),
        g=(decay[..., None] * SPREAD)[None],
        beta=beta[None],
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0]


def space_by_transformers(mixed: torch.Tensor, decay: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Their decay is a rate of each head times the step, so that a head's rate is asked for as -1."""
    del decay
    v, k, q = mixed.split((SHAPE.value_size, SHAPE.key_size, SHAPE.key_size), 1)
    q, k = (part.reshape(1, len(mixed), SHAPE.num_key_heads, SHAPE.key_dim) for part in (q, k))
    v = v.reshape(1, len(mixed), SHAPE.num_value_heads, SHAPE.value_dim)
    rate = -torch.ones(SHAPE.num_value_heads)
    return mamba2_chunk_scan(v, steps[None], rate, k, q, chunk_size=16, D=SKIP)[0]


KINDS = {
    "gated delta": Kind(
        lambda rows, pool, meta, layer: gated_delta(*rows, pool, meta, layer),
        delta_by_transformers,
        ("key", "key", "value"),
    ),
    "gated delta by channels": Kind(
        lambda rows, pool, meta, layer: gated_delta(
            rows[0], rows[1][..., None] * SPREAD, rows[2], pool, meta, layer
        ),
        channels_by_transformers,
        ("key", "key", "value"),
    ),
    "state space": Kind(
        lambda rows, pool, meta, layer: state_space(rows[0], rows[2], -rows[2], SKIP, pool, meta, layer),
        space_by_transformers,
        ("value", "key", "key"),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_parts", "num_heads"), [(1, 1), (1, 3), (2, 2), (4, 4)])
def test_pieces_of_any_length_go_on_where_the_last_ones_ended(
    kind: str, has_bias: bool, dtype: torch.dtype, num_parts: int, num_heads: int
) -> None:
    """Also in pieces of several chunks, and behind draft tokens of which some were right. The pool's dtype changes nothing: a
    state is stored as it is; nor do its heads, of which each has a part of the state, or one state lies in all of them."""
    torch.manual_seed(1)
    plain = ((0, 0),) * 4
    steps = (
        ((150, 1, 64, 0), plain),
        ((1, 1, 1, 1), plain),
        ((65, 7, 0, 200), plain),
        ((1, 0, 2, 1), plain),
        ((1, 1, 3, 1), ((3, 2), (0, 2), (2, 0), (0, 0))),
        ((1, 2, 1, 1), ((1, 1), (1, 0), (70, 1), (0, 1))),
        ((1, 3, 1, 1), plain),
    )
    """The known tokens of each sequence, and how many draft tokens are right, and how many are wrong behind them."""
    totals = [sum(lens[s] + drafts[s][0] for lens, drafts in steps) for s in range(4)]
    x = [torch.randn(n, SHAPE.conv_channels) for n in totals]
    decay = [-F.softplus(torch.randn(n, 4)) for n in totals]
    beta = [torch.sigmoid(torch.randn(n, 4)) for n in totals]
    weight = torch.randn(SHAPE.conv_channels, 4) * 0.5
    bias = torch.randn(SHAPE.conv_channels) if has_bias else None
    part = SHAPE.share(1, num_parts)
    slot_bytes = num_heads * torch.empty(HEAD, dtype=dtype).nbytes
    place = StatePlace(0, 3, -(-part.num_floats * 4 * num_parts // slot_bytes))
    num_blocks = -(-(3 + place.num_slots) // BLOCK)
    pool = torch.full((4 * num_blocks, HEAD[0], num_heads, BLOCK, HEAD[1]), torch.nan, dtype=dtype)
    tables = torch.randperm(4 * num_blocks).view(4, num_blocks)
    layer = StateLayer(SHAPE, place, Convolution(weight, bias), part, KINDS[kind].channels)
    got: list[list[torch.Tensor]] = [[], [], [], []]
    done = [0] * 4
    for lens, drafts in steps:
        seqs = [s for s in range(4) if lens[s]]
        num_drafts = tuple(sum(drafts[s]) for s in seqs) if drafts is not plain else ()
        states = StateBlocks(tables[seqs], torch.tensor([done[s] == 0 for s in seqs]), num_drafts)
        lengths = [lens[s] + sum(drafts[s]) for s in seqs]
        ends = [done[s] + lens[s] + drafts[s][0] for s in range(4)]
        meta = AttentionMeta.over(lengths, lengths, [], torch.zeros(0, dtype=torch.int64), states)
        rows = [
            torch.cat([torch.cat((each[s][done[s] : ends[s]], each[s][: drafts[s][1]])) for s in seqs])
            for each in (x, decay, beta)
        ]
        out = KINDS[kind].ours((rows[0], rows[1], rows[2]), pool, meta, layer)
        for s, own in zip(seqs, out.split(lengths), strict=True):
            got[s].append(own[: ends[s] - done[s]])
            done[s] = ends[s]
        assert meta.take_in([drafts[s][0] for s in seqs]) == (drafts is not plain)
    for s in range(4):
        mixed = F.conv1d(F.pad(x[s].T, (3, 0))[None], weight[:, None], bias, groups=len(weight))[0].T
        want = KINDS[kind].theirs(F.silu(mixed), decay[s], beta[s])
        torch.testing.assert_close(torch.cat(got[s]), want, atol=1e-5, rtol=1e-4)
