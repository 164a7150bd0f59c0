"""The gated block of a layer as one native call (`src/feed_forward.h`).

Each task multiplies with gates and with their ups, and gates them while its sums are in the core's first cache, so neither is
written to memory. The results have the bits of a product, a gate and a product."""

from ctypes import addressof

import torch
from torch import Tensor

from kernels.cpu import library
from kernels.cpu.dense_layers import GATES, given_matrix
from kernels.cpu.pages import result
from kernels.ops import FeedForward, GatedBlock
from kernels.rounding import Activations


def native_feed_forward(
    block: GatedBlock, otherwise: FeedForward, isa: library.Isa | None = None
) -> FeedForward | None:
    """`Ops.feed_forward` for matrices in panels; None for others. `otherwise` computes what is no float32. `isa`: of the gate;
    None: the fastest. Raises ValueError for matrices that do not fit each other."""
    if library.native() is None or block.gate is None:
        return None
    kept, gate = list[Tensor](), GATES[block.gate]
    gate_up = given_matrix(block.gate_up, block.gate_up_bias, kept)
    down = given_matrix(block.down, None, kept)
    if gate_up is None or down is None:
        return None
    inputs, outputs = block.gate_up.shape[1], block.down.shape[0]
    of_gate = library.fastest_exact() if isa is None else isa
    if gate_up.outputs != 2 * down.inputs or (
        block.gate_up_bias is not None and len(block.gate_up_bias) != gate_up.outputs
    ):
        raise ValueError(f"a gated block takes gates and ups for {down.inputs} inputs, not {gate_up.outputs}")

    def computed(x: Activations) -> Tensor:
        assert kept, "they have the memory that the matrices point to"
        if not (isinstance(x, Tensor) and x.dtype == torch.float32 and len(x)):
            return otherwise(x)
        if x.shape[1:] != (inputs,):
            raise ValueError(f"a gated block takes rows (T, {inputs}), not {tuple(x.shape)}")
        rows, out = x.contiguous(), result(len(x), outputs)
        library.loaded().baton_feed_forward(
            of_gate, gate, addressof(gate_up), addressof(down), rows.data_ptr(), len(rows), out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    return computed
