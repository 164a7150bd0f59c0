"""What one rank has: its communicators, its part of the model, and its shard of the KV."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.start_timer import StartTimer
from engine.execution.graphs.graph_capture import Launch
from engine.sizing.model_dims import dims_of, rules_of
from models.causal_model import CausalModel
from models.families.table import read_spec
from models.registry import LoadOptions, load_model
from parallel.balance import first_placement
from parallel.comm import Backend, Comm, connect
from parallel.expert import Spread
from parallel.mesh import Mesh
from parallel.moves import Move, moved
from parallel.plans import ModelShare, even_part
from parallel.rank_collectives import make_collectives, summing
from parallel.relocate import relocate
from parallel.rules import Sharding

_DEFAULTS = LoadOptions()


@dataclass(frozen=True, slots=True)
class Comms:
    tp: Comm
    pp: Comm
    ep: Comm
    experts: Comm
    """The group of all ranks that share a layer's experts."""

    def close(self) -> None:
        for comm in {id(comm): comm for comm in (self.tp, self.pp, self.ep, self.experts)}.values():
            comm.close()


@dataclass(frozen=True, slots=True)
class ModelPart:
    model: CausalModel
    part: ModelShare
    comms: Comms
    shard: Sharding
    """Which part of each of the model's tensors it has."""
    spread: Spread | None
    """Where the experts are; None where the model has none."""

    def fixed(self, launch: Launch) -> Tensor:
        """Return what `launch` returns, with launches that can be captured."""
        return launch() if self.spread is None else self.spread.fixed(launch)

    @torch.inference_mode()
    def relocate(self, layers: Mapping[int, Sequence[Move]]) -> int:
        """Move the experts of these layers, as far as this stage has them. Returns the bytes that came from other ranks.

        All ranks must call it between the same two steps. Nothing that is computed changes."""
        num_bytes = 0
        for layer, moves in layers.items():
            if self.spread is not None and (held := self.model.experts.get(layer)) is not None:
                num_bytes += relocate(self.comms.experts, moves, held.down.shape[0], held.tensors)
                self.spread.place(layer, moved(self.spread.placement(layer), moves))
        return num_bytes


def load_part(
    folder: Path,
    dtype: str,
    device: torch.device,
    mesh: Mesh,
    *,
    rank: int,
    store: Any,
    options: LoadOptions = _DEFAULTS,
    num_spare: int = 0,
    address: str = "127.0.0.1",
    timer: StartTimer | None = None,
) -> ModelPart:
    """Load `rank`'s part of the model on `mesh`. All ranks must call it. `store` is where they find each other, and `address` is
    where they reach this one's host. `num_spare` counts slots for more copies of experts. `options` and `timer` are
    those of `load_model`.

    Raises ConfigError, UnsupportedModel and ReplicaLost."""
    comms = _connect(device, mesh, rank, store, address)
    spec = read_spec(folder, options.implementation)
    dims, spread, own = dims_of(spec), None, None
    sum_parts = summing(comms.tp, deterministic=options.deterministic)
    if dims.num_experts:
        slots = first_placement(dims.num_experts, mesh.num_expert_ranks, num_spare)
        spread = Spread(comms.ep, comms.experts, slots, sum_parts, device)
        own = slots[slice(*even_part(len(slots), comms.experts.size, comms.experts.rank))]
    sharding = Sharding(dims, mesh, rank, rules_of(spec), own)
    vocab = [even_part(dims.vocab_size, mesh.tp, index) for index in range(mesh.tp)]
    collectives = make_collectives(comms.tp, vocab, sum_parts, spread)
    model = load_model(
        folder,
        dtype,
        device,
        sharding,
        options=options,
        layers=range(*sharding.part.layers),
        collectives=collectives,
        timer=timer,
    )
    return ModelPart(model, sharding.part, comms, sharding, spread)


def _connect(device: torch.device, mesh: Mesh, rank: int, store: Any, address: str) -> Comms:
    backend: Backend = "nccl" if device.type == "cuda" else "gloo"

    def over(name: str, ranks: tuple[int, ...]) -> Comm:
        return connect(store, name, ranks, rank, backend=backend, device=device, hostname=address)

    tp, pp = over("tp", mesh.group(rank, "tp")), over("pp", mesh.group(rank, "pp"))
    ep = over("ep", mesh.group(rank, "ep"))
    experts = ep if mesh.dp == 1 else over("experts", mesh.expert_group(rank))
    return Comms(tp, pp, ep, experts)
