"""What a rank's attention layers will ask of `Ops.paged_attention`, from the model's description alone."""

import torch

from kernels.attention.case import Case
from models.spec import ModelSpec
from models.weights import Shard


def attention_cases(
    spec: ModelSpec, shard: Shard, layers: range, dtype: torch.dtype, block_size: int
) -> tuple[Case, ...]:
    """Return one case for each window among `layers`; none with latent attention."""
    if spec.mla is not None:
        return ()
    heads = [
        _rows(spec, shard, f"model.layers.{layers.start}.self_attn.{name}_proj.weight", number)
        // spec.head_dim
        for name, number in (("q", spec.num_heads), ("k", spec.num_kv_heads))
    ]
    windows = sorted({spec.windows[index] for index in layers})
    cap, scale, sinks = spec.attention_soft_cap, spec.attention_scale, spec.sinks
    return tuple(
        Case(
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=spec.head_dim,
            block_size=block_size,
            dtype=dtype,
            scale=scale,
            window=window,
            soft_cap=cap,
            sinks=sinks,
        )
        for window in windows
    )


def _rows(spec: ModelSpec, shard: Shard, name: str, num_heads: int) -> int:
    """Return the rows of a projection's matrix that this rank holds."""
    held = shard(name, (num_heads * spec.head_dim, spec.hidden_size))[0]
    return sum(rows.stop - rows.start for rows in held)
