"""The one link out of an instance of the coarse simulation: first come, first served, layer by layer while the next computes."""

from typing import Protocol


class Link(Protocol):
    """sim.catalogue.cost.LinkCost is one."""

    def duration_s(self, num_bytes: float) -> float: ...


class OutLink:
    def __init__(self, cost: Link, num_layers: int) -> None:
        self._cost, self._num_layers = cost, num_layers
        self._free_at = 0.0

    def send(self, num_bytes: int, began_at: float, ended_at: float) -> float:
        """Return when all KV of a step, which lasted from `began_at` to `ended_at`, will have arrived."""
        first_layer_at = began_at + (ended_at - began_at) / self._num_layers
        sent_at = max(self._free_at, first_layer_at) + self._cost.duration_s(num_bytes)
        self._free_at = max(sent_at, ended_at + self._cost.duration_s(num_bytes / self._num_layers))
        return self._free_at
