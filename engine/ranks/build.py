"""What one rank has: its communicators, its part of the model, the shard of the KV that belongs to it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from core.kv import KVShard
from engine.dims import dims_of
from models.families import read_spec
from models.model import Model
from models.registry import load_model
from parallel.comm import Backend, Comm, connect
from parallel.joins import tensor_joins
from parallel.mesh import Mesh
from parallel.plans import even_part, part_of
from parallel.rules import Sharding


@dataclass(frozen=True, slots=True)
class Comms:
    tp: Comm
    pp: Comm
    ep: Comm

    def close(self) -> None:
        for comm in (self.tp, self.pp, self.ep):
            comm.close()


@dataclass(frozen=True, slots=True)
class ModelPart:
    model: Model
    shard: KVShard
    comms: Comms


def shards_of(folder: Path, mesh: Mesh, block_size: int, dtype: str) -> tuple[KVShard, ...]:
    """What each rank of a mesh keeps of the KV, from the model's description alone."""
    spec = read_spec(folder)
    layout, dims = spec.kv_layout(block_size, dtype), dims_of(spec)
    parts = [part_of(dims, mesh, rank) for rank in range(mesh.size)]
    return tuple(KVShard(layout, part.layers, part.kv_heads) for part in parts)


def load_part(
    folder: Path, dtype: str, device: torch.device, mesh: Mesh, rank: int, store: Any, block_size: int = 16
) -> ModelPart:
    """`rank`'s of `mesh`; all ranks must call. `store` is where they find each other. Raises ConfigError and ReplicaLost."""
    backend: Backend = "nccl" if device.type == "cuda" else "gloo"
    comms = Comms(
        *[connect(store, axis, mesh.group(rank, axis), rank, backend, device) for axis in ("tp", "pp", "ep")]
    )
    dims = dims_of(read_spec(folder))
    sharding = Sharding(dims, mesh, rank)
    vocab = [even_part(dims.vocab_size, mesh.tp, index) for index in range(mesh.tp)]
    joins = tensor_joins(comms.tp, vocab)
    model = load_model(folder, dtype, device, sharding, range(*sharding.part.layers), joins)
    shard = KVShard(model.spec.kv_layout(block_size, dtype), sharding.part.layers, sharding.part.kv_heads)
    return ModelPart(model, shard, comms)
