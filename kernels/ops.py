"""The operations a model is made of, and their shapes. `kernels.select` chooses the implementation for a device.

T: tokens of a step, packed. B: sequences of a step. H, Hkv: query and KV heads. D: head dimension.
A rank's KV of one layer is (num_blocks, 2, Hkv, block_size, D), with latent attention (num_blocks, 1, 1, block_size, R + P + I):
core.kv's layout, which may have 8 bits with scales. I: dimensions of index keys, 0 where there are none."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from core.records import record
from kernels.kv_parts import KVPart, ScaledKV, ScaledLatents
from kernels.packed import ExpertWeight, Kind, LinearWeight, LookUp, Weight, tensors_of
from kernels.rounding import Activations, Rounded, Rounding
from kernels.routing import Routing
from kernels.sampling import Masks, Penalties, SampleShapes
from kernels.state_layer import StateLayer

TakeIn = Callable[["AttentionMeta", Tensor], None]
"""(meta of some sequences, rows (T,) int64): take these rows of the draft tokens into their states."""


@dataclass(frozen=True, slots=True)
class StateBlocks:
    """Where the states of a step's sequences lie, and which of its tokens they do not take in yet."""

    blocks: Tensor
    """(B, blocks of a state) int64"""
    begins: Tensor
    """(B,) bool: the sequence's first token is in this step, so that nothing is in its blocks yet."""
    num_drafts: tuple[int, ...] = ()
    """How many of each sequence's rows, the last ones, are draft tokens; () where none are. They are computed as though they were
    right, but states are written as they are behind the rows before them."""
    kept: list[TakeIn] = field(default_factory=list[TakeIn])
    """What `AttentionMeta.take_in` calls: each layer that has computed draft tokens keeps what goes into its states of them."""


Rows = slice | Tensor
"""Some rows of a step, ascending: neighbours, or (N,) int64."""


@record(kw_only=True)
class AttentionMeta:
    """Which rows of a packed step belong to which sequence, and where each sequence's KV lies."""

    query_starts: tuple[int, ...]
    """(B+1,) first row of each sequence."""
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    """Tokens in the KV cache once the step's own are written."""
    block_tables: tuple[Tensor, ...]
    """Per sequence (at least its context's blocks,) int64, in host memory: implementations derive from it what they upload."""
    slots: Tensor
    """(T,) int64: block_id * block_size + offset, where each token's KV goes."""
    cache: dict[Any, Any] = field(default_factory=dict[Any, Any])
    """What an implementation derives from the above, once a step instead of once a layer."""
    counted: Tensor | None = None
    """(T,) int64: 1, or 0 for rows that only fill up a step. None means that all rows are real tokens."""
    states: StateBlocks | None = None
    """Where the sequences' recurrent states lie. None where the model has none."""
    adapters: Mapping[str, Rows] = field(default_factory=dict[str, Rows])
    """The rows for which an adapter changes the model, by the adapter's name; empty where it does so for none."""
    read_lens: tuple[int, ...] | None = None
    """(B,) the last rows of each sequence of which the state behind the last layer is read: that of others need not be computed.
    None means that all are read."""
    both_ways: tuple[bool, ...] = ()
    """For each sequence whether its tokens see all of its context, those that follow them, too. Empty: none does."""
    is_fixed: bool = False
    """Whether a `FixedStep` fills lengths and blocks into device memory before each step. The fields above then mean nothing."""

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[np.ndarray],
        slots: np.ndarray,
        device: torch.device,
        states: StateBlocks | None = None,
    ) -> "AttentionMeta":
        tables = [torch.from_numpy(table) for table in block_tables]
        return cls.over(query_lens, context_lens, tables, torch.from_numpy(slots).to(device), states)

    @classmethod
    def over(
        cls,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[Tensor],
        slots: Tensor,
        states: StateBlocks | None = None,
        adapters: Mapping[str, Rows] | None = None,
        read_lens: tuple[int, ...] | None = None,
        *,
        both_ways: Sequence[bool] = (),
    ) -> "AttentionMeta":
        return cls(
            query_starts=tuple(accumulate(query_lens, initial=0)),
            query_lens=tuple(query_lens),
            context_lens=tuple(context_lens),
            block_tables=tuple(block_tables),
            slots=slots,
            states=states,
            adapters=adapters or {},
            read_lens=read_lens,
            both_ways=tuple(both_ways) if any(both_ways) else (),
        )

    def sees_all(self, seq: int) -> bool:
        """Return `both_ways` of one sequence."""
        return bool(self.both_ways) and self.both_ways[seq]

    @classmethod
    def of_states(cls, query_lens: Sequence[int], states: StateBlocks | None = None) -> "AttentionMeta":
        """Return it without what only layers with keys and values need."""
        return cls.over(query_lens, query_lens, (), torch.empty(0, dtype=torch.int64), states)

    def take_in(self, num_right: Sequence[int]) -> bool:
        """Take the first `num_right` draft tokens of each sequence, which were right, into its states. Return if there are
        any."""
        states, seqs = self.states, [seq for seq, count in enumerate(num_right) if count]
        if states is None or not seqs:
            return False
        firsts = tuple(accumulate(states.num_drafts, initial=0))
        rows = [firsts[seq] + at for seq in seqs for at in range(num_right[seq])]
        device = states.blocks.device
        own = states.blocks.index_select(0, torch.tensor(seqs, device=device))
        begins = torch.zeros(len(seqs), dtype=torch.bool, device=device)
        right = AttentionMeta.of_states([num_right[seq] for seq in seqs], StateBlocks(own, begins))
        taken = torch.tensor(rows, device=device)
        for take_in in states.kept:
            take_in(right, taken)
        return True


class FixedStep(Protocol):
    """Steps of one number of tokens that launch the same kernels with the same arguments, so that the launches can be captured
    once and replayed. What differs between them is read from memory whose place does not change."""

    @property
    def meta(self) -> AttentionMeta:
        """What a model's forward pass is captured with. Its slots are filled with the rest."""
        ...

    @property
    def has_tall(self) -> bool:
        """Whether `smaller` returns others that are `tall`."""
        ...

    def smaller(self, num_rows: int, *, tall: bool = False) -> "FixedStep":
        """Return one of at most as many tokens whose block tables lie where this one's do: steps take turns. `tall`: it is the
        faster one for prompts that see many tokens, and the slower one for all else."""
        ...

    def fits(self, query_lens: Sequence[int], context_lens: Sequence[int]) -> bool:
        """Return whether there are places for a step of these sequences, which have at most as many tokens."""
        ...

    def inputs(
        self,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[np.ndarray],
        slots: Sequence[int] | np.ndarray,
    ) -> list[np.ndarray]:
        """Return what `fill` puts in for the next replay, of sequences whose tokens follow each other and have `slots`. The rows
        behind them see nothing, and are written into a block that no sequence has."""
        ...

    def fill(self, inputs: Sequence[Tensor]) -> None:
        """Fill in the next replay with what `inputs` returned last, on the device."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts that a rank holds, S slots of them, each whole or with a part of its inner dimension I."""

    gate_up: ExpertWeight
    """(S, 2I, hidden): gates, then ups."""
    down: ExpertWeight
    """(S, hidden, I)"""
    gate_up_bias: Tensor | None = None
    """(S, 2I)"""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors that an expert consists of, (S, ...) each."""
        bias = () if self.gate_up_bias is None else (self.gate_up_bias,)
        return *tensors_of(self.gate_up), *tensors_of(self.down), *bias


Latents = Tensor | ScaledLatents
"""One layer's latents, with index keys behind them if the model has any."""
KVLayer = Tensor | ScaledKV | ScaledLatents | KVPart
"""One layer's KV."""
Gate = Literal["silu", "gelu_tanh"]
HeadNorms = tuple[Tensor, Tensor, float]
"""Weights (D,) float32 of the RMSNorm of queries' and of keys' heads; eps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPart:
    """A layer's attention with keys and values for each head, as data."""

    norm: Tensor
    """(N,) float32: of what comes in."""
    qkv: LinearWeight
    """((H + 2 Hkv) D, N)"""
    qkv_bias: Tensor | None
    head_dim: int
    head_norms: HeadNorms | None
    rotation: int
    """Which of a step's rotations is the layer's."""
    scale: float
    window: int
    soft_cap: float
    sinks: Tensor | None
    """These four are what `Ops.paged_attention` takes."""
    out: LinearWeight
    """(N, H D)"""
    out_bias: Tensor | None
    norm_behind: Tensor | None
    """(N,) float32: of what goes out, before it is added to the residual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpPart:
    """A layer's gated block that every token passes, as data."""

    norm: Tensor
    gate_up: LinearWeight
    """(2 I, N): gates, then ups."""
    gate_up_bias: Tensor | None
    gate: Gate
    down: LinearWeight
    """(N, I)"""
    down_bias: Tensor | None
    norm_behind: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayer:
    """A whole layer of a rank that shares it with no other, as data."""

    attention: AttentionPart
    mlp: MlpPart
    eps: float
    """What all norms but the heads' add to the mean of squares."""
    residual_scale: float
    """What is given by both parts is multiplied with it before it is added to the residual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedBlock:
    """Two products, and a gate between them, as data."""

    gate_up: LinearWeight
    """(2 I, N): gates, then ups."""
    gate_up_bias: Tensor | None
    gate: Gate | None
    """None: something else."""
    down: LinearWeight
    """(N, I)"""


FeedForward = Callable[[Activations], Tensor]
"""(x (T, N)) -> (T, N)"""
FusedLayers = Callable[
    [Tensor, Sequence[tuple[Tensor, Tensor]], Sequence[KVLayer], AttentionMeta], tuple[Tensor, Tensor] | None
]
"""(x (T, N), cosines and sines (T, D) of each rotation, each layer's KV, meta) -> the residual behind the last layer, and what is
to be added to it, (T, N) each, of which rows that `meta.read_lens` leaves out may be anything; or None, with nothing done, for a
step that is better computed one operation after the other. `x` may be overwritten. The results have the bits of the single
operations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One implementation of everything, for one kind of device. Outputs have the dtype of the inputs."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x (..., N), weight (N,) float32, eps) -> (..., N); computed in float32."""
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    """(x (T, N), residual (T, N), weight, eps) -> their sum, and its `rms_norm`. `residual` may be overwritten."""
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(x (T, heads, D), cos (T, D), sin (T, D)) -> (T, heads, D); halves are rotated (GPT-NeoX order)."""
    silu_mul: Callable[[Tensor], Tensor]
    """(x (T, 2N)) -> silu(x[:, :N]) * x[:, N:]"""
    gelu_tanh_mul: Callable[[Tensor], Tensor]
    """The same with GELU's tanh approximation."""
    clamped_swiglu: Callable[[Tensor, float, float], Tensor]
    """(x (T, 2N), alpha, limit) -> g * sigmoid(alpha * g) * (u + 1), g being x[:, :N] where it is at most `limit`, and u being
    x[:, N:] where it is between -limit and limit."""
    pack: Callable[[Weight, torch.dtype], LinearWeight]
    """(weight, what x will be) -> the same in the form that `linear` multiplies fastest. Called once for a weight, as a model is
    loaded."""
    look_up: Callable[[Weight, torch.dtype, LinearWeight | None], LookUp]
    """(embedding (V, N), what rows will be, the head that it is tied to, packed, or None) -> its rows. Called once."""
    pack_experts: Callable[[ExpertWeights], ExpertWeights]
    """Experts in the form that `experts` multiplies fastest. Called once, as they are loaded."""
    linear: Callable[[Activations, LinearWeight, Tensor | None], Tensor]
    """(x (T, N), weight (M, N), bias (M,) or None) -> (T, M). x is rounded first as `rounds` says, unless it has been."""
    rounds: Callable[[Weight], Rounding | None]
    """What `linear` rounds the other side of a weight to. So a producer can round once for all products that take it."""
    norm_rounded: Callable[[Tensor, Tensor | None, Tensor, float, Rounding], tuple[Tensor, Rounded]]
    """(x (T, N), residual (T, N) or None, weight, eps, rounding) -> their sum, and its `rms_norm`, rounded. `residual` may be
    overwritten."""
    gated_rounded: Callable[[Tensor, Gate, Rounding], Rounded]
    """(x (T, 2N), gate, rounding) -> `silu_mul` or `gelu_tanh_mul` of x, rounded."""
    by_rows: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
    """(operation, x (T, ...)) -> operation(x), which is row by row and the same object at every call."""
    feed_forward: Callable[[GatedBlock, FeedForward], FeedForward]
    """(block, what computes it one operation after the other) -> what computes it fastest, with the same bits. Of many rows
    some at a time may be computed, so that a processor's cache holds what is larger on the way."""
    rope_write_kv: Callable[[Tensor, Tensor, Tensor, HeadNorms | None, KVLayer, AttentionMeta], Tensor]
    """(qkv (T, (H + 2 Hkv) D), cos (T, D), sin (T, D), norms, kv_layer, meta) -> queries (T, H, D). Queries and keys pass their
    norms, if any, and are rotated as in `rope`; keys and values are stored at meta.slots."""
    paged_attention: Callable[[Tensor, KVLayer, AttentionMeta, float, int, float, Tensor | None], Tensor]
    """(q (T, H, D), kv_layer, meta, scale, window, soft_cap, sinks) -> (T, H, D). Causal, but where meta.both_ways. A token
    attends to no earlier ones than the last `window`, itself included (0: to all); scores pass through
    soft_cap * tanh(score / soft_cap) (0: not). `sinks` ((H,) float32 or None): one more score for each head in the softmax, to
    which no value belongs."""
    route: Callable[[Tensor, Tensor | None, Routing], tuple[Tensor, Tensor]]
    """(logits (T, E) float32, choice_bias (E,) float32 or None, routing) -> experts (T, K) int64, weights (T, K) float32.
    The bias takes part in the choice only."""
    experts: Callable[[Tensor, Tensor, Tensor, ExpertWeights, Callable[[Tensor], Tensor]], Tensor]
    """(x (N, hidden), slots (N, K) int64, weights (N, K) float32, held, activate) -> (N, hidden): each row's weighted sum over
    its slots of down(activate(gate_up(x))); slot -1 is no expert and adds nothing. `activate` is (M, 2I) -> (M, I)."""
    penalise: Callable[[Tensor, Penalties], None]
    """In place, logits (N, V) float32: tokens of a row's history are divided by its repetition penalty where positive, multiplied
    with it elsewhere; less its presence penalty and so many times its frequency penalty as they are in its output."""
    sample: Callable[[Tensor, SampleShapes, Masks | None], Tensor]
    """(logits (N, V) float32, samples of N rows, masks) -> tokens (N,) int64: of those that may be sampled the first, by id,
    whose cumulative probability exceeds the number's part of their total. The logits may be overwritten. Where all rows take
    their likeliest token, and none has a mask, they may be of 16 bits."""
    logprobs: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]
    """(logits (N, V) float32, tokens (N,) int64, num_top) -> log-probabilities (N,) of the tokens, (N, num_top) of the likeliest,
    descending, and which those are, int64."""
    write_latent: Callable[[Tensor, Latents, AttentionMeta], None]
    """(latent (T, R + P), or with index keys behind them (T, R + P + I), kv_layer, meta): store at meta.slots."""
    latent_attention: Callable[[Tensor, Latents, AttentionMeta, float, Tensor, Tensor], Tensor]
    """(q (T, H, N + P), kv_layer, meta, scale, k_up (H, N, R), v_up (H, V, R)) -> (T, H, V). Causal. A token's key
    of head h is (k_up[h] @ latent, its P shared rotated elements), its value v_up[h] @ latent."""
    select_tokens: Callable[[Tensor, Tensor, Latents, AttentionMeta, int], Tensor]
    """(q (T, J, I) of J index heads, weights (T, J) float32, kv_layer with index keys, meta, top_k) -> slots (T,
    top_k) int64, in the order of tokens. Each query sees at least `top_k` tokens, and gets those with the highest sums over
    heads of weight * relu(q @ key), computed in float32; of equal ones the first."""
    selected_attention: Callable[[Tensor, Latents, Tensor, AttentionMeta, float, Tensor, Tensor], Tensor]
    """(q (T, H, N + P), kv_layer, slots (T, K) int64, meta, scale, k_up, v_up) -> (T, H, V): as `latent_attention`,
    but each query attends to the tokens at its slots alone."""
    gated_delta: Callable[[Tensor, Tensor, Tensor, Tensor, AttentionMeta, StateLayer], Tensor]
    """(x (T, channels), decay (T, H) or (T, H, key_dim) float32, beta (T, H) float32, kv_layer, meta, layer) -> (T, H,
    value_dim). H: value heads. x passes the convolution and silu; it is then q and k of each key head and v of each value head.
    With q and k of length one and q by key_dim ** -0.5: state = exp(decay) state; state += k (beta (v - k state)); out = q state.
    Reads and writes the sequences' states at meta.states."""
    short_convolution: Callable[[Tensor, Tensor, AttentionMeta, StateLayer], Tensor]
    """(x (T, channels), kv_layer, meta, layer) -> (T, channels): what each channel's filter makes of its last inputs. Reads and
    writes the sequences' last inputs at meta.states."""
    state_space: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, AttentionMeta, StateLayer], Tensor]
    """(x (T, channels), steps (T, H) float32, decay (T, H) float32, skip (H,) float32, kv_layer, meta, layer) -> (T, H,
    value_dim). H: value heads. x passes the convolution and silu; it is then v of each value head, and k and q of each key head.
    state = exp(decay) state; state += k (step v); out = q state + skip v. Reads and writes the sequences' states at
    meta.states."""
    fixed_step: Callable[[int, int, int, int, int, torch.device], FixedStep] | None
    """(tokens, most sequences, most blocks of a sequence, a block behind all that sequences have, block_size, device) -> what
    captured steps are over; None where some operations here cannot be captured."""
    fuse: Callable[[Sequence[DenseLayer]], FusedLayers | None]
    """(layers) -> all of them as one operation, whose object is for one thread; None where there is none for such layers."""
    keeps: frozenset[Kind]
    """The weights that are multiplied fastest as they are stored. Others are better made floats once."""
