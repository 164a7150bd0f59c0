"""All layers of a dense decoder as one native call (`src/layers.h`).

Where each operation is a call of its own, the threads that multiply sleep while Python is on its way to the next one, and are
woken again. Here they have one job, whose tasks are those of the single operations, so that no bit changes. Behind the last
layer's keys and values only rows that are read are computed: of a prompt's tokens, the last."""

import operator
import weakref
from array import array
from collections.abc import Mapping, Sequence
from ctypes import byref
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from kernels.cpu import attention, library
from kernels.cpu.elementwise import GELU, SILU, checked_slots
from kernels.cpu.layer_structs import GivenLayer, GivenMatrix, LayerStep
from kernels.cpu.linear import InPanels
from kernels.cpu.pages import result
from kernels.ops import AttentionMeta, DenseLayer, FusedLayers, Gate, KVLayer
from kernels.packed import LinearWeight

_KEPT: Final = (torch.float32, torch.bfloat16)
"""What pools may have; bfloat16 only where rows are rounded to it."""
GATES: Final[dict[Gate, int]] = {"silu": SILU, "gelu_tanh": GELU}


def fuse(layers: Sequence[DenseLayer], isa: library.Isa | None = None) -> FusedLayers | None:
    """`Ops.fuse`: for matrices in panels, and heads that native attention takes. `isa`: of all that is no product; None: the
    fastest of each. Raises ValueError for layers whose parts do not fit each other."""
    if library.native() is None or not layers:
        return None
    shape, given, kept = _Shape.of(layers[0]), list[GivenLayer](), list[Tensor]()
    for layer in layers:
        if (made := _given(layer, kept)) is None or _Shape.of(layer) != shape:
            return None
        _check(layer, shape)
        given.append(made)
    for_heads = dict[torch.dtype, library.Isa]()
    for kept_as in _KEPT:
        if (found := attention.fastest(shape.size, kept_as) if isa is None else isa) is None:
            return None
        for_heads[kept_as] = found
    return NativeLayers(given, kept, shape, library.fastest_exact() if isa is None else isa, for_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    hidden: int
    heads: int
    kv_heads: int
    size: int

    @classmethod
    def of(cls, layer: DenseLayer) -> "_Shape":
        part = layer.attention
        size, heads = part.head_dim, part.out.shape[1] // part.head_dim
        kv_heads = (part.qkv.shape[0] // size - heads) // 2
        return cls(hidden=part.qkv.shape[1], heads=heads, kv_heads=kv_heads, size=size)


@dataclass(frozen=True, slots=True)
class _Pools:
    """Where the layers' KV lies, which whoever computes on it keeps alive."""

    layers: tuple[weakref.ref[Tensor], ...]
    addresses: Tensor
    """(layers,) int64"""
    dtype: torch.dtype
    num_blocks: int
    block_size: int

    @classmethod
    def of(cls, kv: Sequence[KVLayer], shape: _Shape) -> "_Pools | None":
        """Return None for KV of other numbers than `_KEPT`, or of several kinds."""
        pools = [each for each in kv if isinstance(each, Tensor) and each.is_contiguous()]
        kinds = {pool.dtype for pool in pools}
        if len(pools) < len(kv) or len(kinds) > 1 or kinds.isdisjoint(_KEPT):
            return None
        num_blocks, block_size = pools[0].shape[0], pools[0].shape[3]
        wanted = num_blocks, 2, shape.kv_heads, block_size, shape.size
        if any(pool.shape != wanted for pool in pools):
            raise ValueError(
                f"fused layers take a pool {wanted} for each, not {[tuple(pool.shape) for pool in pools]}"
            )
        addresses = torch.tensor([pool.data_ptr() for pool in pools], dtype=torch.int64)
        return cls(tuple(map(weakref.ref, pools)), addresses, pools[0].dtype, num_blocks, block_size)

    def are(self, kv: Sequence[KVLayer]) -> bool:
        return all(known() is layer for known, layer in zip(self.layers, kv, strict=True))


class NativeLayers:
    """`kernels.ops.FusedLayers`."""

    def __init__(
        self,
        given: Sequence[GivenLayer],
        kept: Sequence[Tensor],
        shape: _Shape,
        isa: library.Isa,
        for_heads: Mapping[torch.dtype, library.Isa],
    ) -> None:
        """`kept` has the memory that `given` points to. `for_heads`: the instruction set of attention by a pool's dtype."""
        self._given, self._num_layers, self._kept = (GivenLayer * len(given))(*given), len(given), kept
        self._num_rotations = 1 + max(layer.rotation for layer in given)
        self._shape, self._for_heads = shape, for_heads
        self._pools: _Pools | None = None
        self._step = LayerStep(
            row_isa=isa, hidden=shape.hidden, heads=shape.heads, kv_heads=shape.kv_heads, size=shape.size
        )
        """What the library is told; what differs between steps is written anew."""

    def __call__(
        self,
        x: Tensor,
        rotations: Sequence[tuple[Tensor, Tensor]],
        kv: Sequence[KVLayer],
        meta: AttentionMeta,
    ) -> tuple[Tensor, Tensor] | None:
        if meta.is_fixed or meta.both_ways or not x.size(0) or x.dtype != torch.float32:
            return None
        if len(kv) != self._num_layers:
            raise ValueError(f"fused layers take KV of {self._num_layers} layers, not of {len(kv)}")
        if self._pools is None or not self._pools.are(kv):
            self._pools = self._described(_Pools.of(kv, self._shape))
        if self._pools is None or not self._writes(self._pools.dtype):
            return None
        x = x.contiguous()
        self._check(x, rotations, meta)
        return x, self._run(x, rotations, self._pools, meta)

    def _described(self, pools: _Pools | None) -> _Pools | None:
        if pools is not None:
            step = self._step
            step.block_size, step.pools = pools.block_size, pools.addresses.data_ptr()
            step.number, step.attention_isa = attention.NUMBERS[pools.dtype], self._for_heads[pools.dtype]
        return pools

    def _writes(self, kept: torch.dtype) -> bool:
        return kept == torch.float32 or self._for_heads[kept].rounds_rows

    def _run(
        self, x: Tensor, rotations: Sequence[tuple[Tensor, Tensor]], pools: _Pools, meta: AttentionMeta
    ) -> Tensor:
        rows, step = x.size(0), self._step
        slots = checked_slots(meta, rows, pools.num_blocks * pools.block_size)
        seqs = attention.sequences_of(meta, pools.num_blocks, pools.block_size)
        read = array("q", () if meta.read_lens is None else accumulate(meta.read_lens, initial=0))
        cosines, sines = (
            array("q", [each.data_ptr() for each in kind]) for kind in zip(*rotations, strict=True)
        )
        added = result(rows, self._shape.hidden)
        step.x, step.added, step.rows = x.data_ptr(), added.data_ptr(), rows
        step.sequences, step.slots = len(meta.query_lens), slots.data_ptr()
        step.query_starts, step.context_lens, step.tables = seqs.query_starts, seqs.context_lens, seqs.tables
        step.read_starts = read.buffer_info()[0] if read else seqs.query_starts
        step.cos, step.sin = cosines.buffer_info()[0], sines.buffer_info()[0]
        library.loaded().baton_run_layers(self._given, self._num_layers, byref(step), torch.get_num_threads())
        return added

    def _check(self, x: Tensor, rotations: Sequence[tuple[Tensor, Tensor]], meta: AttentionMeta) -> None:
        """Pointers know no types and no bounds."""
        rows, shape = x.size(0), self._shape
        if x.shape != (rows, shape.hidden) or meta.query_starts[-1] != rows:
            raise ValueError(
                f"fused layers take rows ({meta.query_starts[-1]}, {shape.hidden}), as the step says, "
                f"not {tuple(x.shape)}"
            )
        read = meta.read_lens
        if read is not None and (
            len(read) != len(meta.query_lens) or any(map(operator.gt, read, meta.query_lens)) or min(read) < 0
        ):
            raise ValueError(
                f"fused layers take at most {meta.query_lens} rows that are read, not {meta.read_lens}"
            )
        angles = [each for rotation in rotations for each in rotation]
        if len(rotations) < self._num_rotations or not all(
            each.shape == (rows, shape.size) and each.dtype == torch.float32 and each.is_contiguous()
            for each in angles
        ):
            raise ValueError(
                f"fused layers take {self._num_rotations} rotations ({rows}, {shape.size}) of float32, "
                f"not {[tuple(each.shape) for each in angles]}"
            )


def _given(layer: DenseLayer, kept: list[Tensor]) -> GivenLayer | None:
    """Return the layer as the library takes it, where its matrices are in panels. What that points to is added to `kept`."""
    part, mlp = layer.attention, layer.mlp
    qkv, output = given_matrix(part.qkv, part.qkv_bias, kept), given_matrix(part.out, part.out_bias, kept)
    gate_up, down = (
        given_matrix(mlp.gate_up, mlp.gate_up_bias, kept),
        given_matrix(mlp.down, mlp.down_bias, kept),
    )
    if qkv is None or output is None or gate_up is None or down is None:
        return None
    q_norm, k_norm, head_eps = (None, None, 0.0) if part.head_norms is None else part.head_norms
    return GivenLayer(
        qkv=qkv,
        output=output,
        gate_up=gate_up,
        down=down,
        attention_norm=_floats(part.norm, kept),
        q_norm=_floats(q_norm, kept),
        k_norm=_floats(k_norm, kept),
        sinks=_floats(part.sinks, kept),
        behind_attention=_floats(part.norm_behind, kept),
        mlp_norm=_floats(mlp.norm, kept),
        behind_mlp=_floats(mlp.norm_behind, kept),
        window=part.window,
        gate=GATES[mlp.gate],
        rotation=part.rotation,
        score_scale=part.scale,
        soft_cap=part.soft_cap,
        eps=layer.eps,
        head_eps=head_eps,
        residual_scale=layer.residual_scale,
    )


def given_matrix(weight: LinearWeight, bias: Tensor | None, kept: list[Tensor]) -> GivenMatrix | None:
    """Return the matrix as the library takes it, where it is in panels. What that points to is added to `kept`."""
    if not isinstance(weight, InPanels):
        return None
    panels = weight.panels
    kept.append(panels.data)
    return GivenMatrix(
        isa=panels.isa,
        format=panels.layout,
        outputs=panels.outputs,
        inputs=panels.inputs,
        group=panels.group,
        zero_bytes=panels.zero_bytes,
        scales=panels.scales,
        panels=panels.data.data_ptr(),
        bias=_floats(bias, kept),
    )


def _floats(numbers: Tensor | None, kept: list[Tensor]) -> int | None:
    """Return their address."""
    if numbers is None:
        return None
    kept.append(numbers.float().contiguous())
    return kept[-1].data_ptr()


def _check(layer: DenseLayer, shape: _Shape) -> None:
    part, mlp, hidden = layer.attention, layer.mlp, shape.hidden
    inner, heads = mlp.down.shape[1], shape.heads * shape.size
    qkv = heads + 2 * shape.kv_heads * shape.size
    q_norm, k_norm = (None, None) if part.head_norms is None else part.head_norms[:2]
    wanted: list[tuple[Tensor | LinearWeight | None, tuple[int, ...]]] = [
        *((part.qkv, (qkv, hidden)), (part.qkv_bias, (qkv,)), (part.sinks, (shape.heads,))),
        *((part.out, (hidden, heads)), (mlp.gate_up, (2 * inner, hidden)), (mlp.gate_up_bias, (2 * inner,))),
        *((mlp.down, (hidden, inner)), (q_norm, (shape.size,)), (k_norm, (shape.size,))),
        *((each, (hidden,)) for each in (part.norm, part.norm_behind, part.out_bias)),
        *((each, (hidden,)) for each in (mlp.norm, mlp.norm_behind, mlp.down_bias)),
    ]
    for found, size in wanted:
        if found is not None and tuple(found.shape) != size:
            raise ValueError(
                f"fused layers take parts that fit each other, not {tuple(found.shape)} for {size}"
            )
