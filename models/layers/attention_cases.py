"""What a rank's attention layers will ask of `Ops.paged_attention`, from the model's description alone."""

import torch

from kernels.attention.case import Case
from models.formats.checkpoint import Shard
from models.spec.model_spec import ModelSpec


def attention_cases(
    spec: ModelSpec, shard: Shard, layers: range, dtype: torch.dtype, block_size: int
) -> tuple[Case, ...]:
    """Return one case for each window among `layers`; none with latent or compressed attention, nor for layers that have a part
    of a pool's heads."""
    if spec.mla is not None or spec.compressed is not None:
        return ()
    whole = [index for index in layers if spec.kv is None or spec.kv.places[index] is None]
    if not whole:
        return ()
    kv, size = spec.heads_of(whole[0]).num_kv_heads, spec.heads_of(whole[0]).head_dim
    heads = [
        _rows(spec, shard, f"model.layers.{whole[0]}.self_attn.{name}_proj.weight", number, size) // size
        for name, number in (("q", spec.num_heads), ("k", kv))
    ]
    windows = sorted({spec.windows[index] for index in whole})
    cap, scale, sinks = spec.attention_soft_cap, spec.attention_scale, spec.sinks
    return tuple(
        Case(
            num_heads=heads[0],
            num_kv_heads=heads[1],
            head_dim=size,
            block_size=block_size,
            dtype=dtype,
            scale=scale,
            window=window,
            soft_cap=cap,
            sinks=sinks,
        )
        for window in windows
    )


def _rows(spec: ModelSpec, shard: Shard, name: str, num_heads: int, head_dim: int) -> int:
    """Return the rows of a projection's matrix that this rank holds."""
    held = shard(name, (num_heads * head_dim, spec.hidden_size))[0]
    return sum(rows.stop - rows.start for rows in held)
