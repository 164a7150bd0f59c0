"""The one link out of an instance of the coarse simulation: first come, first served, layer by layer while the next computes."""

from typing import Protocol


class Link(Protocol):
    """sim.catalogue.cost.LinkCost is one."""

    def duration_s(self, num_bytes: float) -> float: ...


class OutLink:
    def __init__(self, cost: Link, num_layers: int) -> None:
        self._cost, self._num_layers = cost, num_layers
        self._free_s = 0.0

    def send(self, num_bytes: int, began_s: float, ended_s: float) -> float:
        """Return when all KV of a step, which lasted from `began_s` to `ended_s`, will have arrived."""
        first_layer_s = began_s + (ended_s - began_s) / self._num_layers
        sent_s = max(self._free_s, first_layer_s) + self._cost.duration_s(num_bytes)
        self._free_s = max(sent_s, ended_s + self._cost.duration_s(num_bytes / self._num_layers))
        return self._free_s
