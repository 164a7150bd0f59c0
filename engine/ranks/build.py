"""What one rank has: its communicators, its part of the model, the shard of the KV that belongs to it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.dims import dims_of, rules_of
from kernels.select import Kernels
from models.families import read_spec
from models.model import Model
from models.registry import load_model
from parallel.comm import Backend, Comm, connect
from parallel.joins import make_joins
from parallel.mesh import Axis, Mesh
from parallel.plans import Part, even_part
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
    part: Part
    comms: Comms

    @property
    def bytes_read(self) -> int:
        return self.model.bytes_read


def load_part(
    folder: Path,
    dtype: str,
    device: torch.device,
    mesh: Mesh,
    rank: int,
    store: Any,
    kernels: Kernels = "auto",
    deterministic: bool = False,
) -> ModelPart:
    """`rank`'s of `mesh`; all ranks must call. `store` is where they find each other. Raises ConfigError and ReplicaLost."""
    backend: Backend = "nccl" if device.type == "cuda" else "gloo"
    axes: tuple[Axis, ...] = ("tp", "pp", "ep")
    comms = Comms(*[connect(store, axis, mesh.group(rank, axis), rank, backend, device) for axis in axes])
    spec = read_spec(folder)
    dims = dims_of(spec)
    sharding = Sharding(dims, mesh, rank, rules_of(spec))
    vocab = [even_part(dims.vocab_size, mesh.tp, index) for index in range(mesh.tp)]
    joins = make_joins(comms.tp, comms.ep, vocab, range(dims.num_experts), deterministic)
    layers = range(*sharding.part.layers)
    model = load_model(folder, dtype, device, sharding, layers, joins, kernels, deterministic)
    return ModelPart(model, sharding.part, comms)
