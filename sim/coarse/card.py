"""A card that devices of the coarse simulation share: whether another one runs beside a step."""

from sim.catalogue.cost import SharedCost, SharedStep
from sim.coarse.device import Device


class Card:
    def __init__(self) -> None:
        self._devices: list[Device] = []

    def step(self, cost: SharedCost) -> SharedStep:
        """Return the steps of the device that is `put` here next."""
        number = len(self._devices)
        return SharedStep(cost, lambda: self._is_beside(number))

    def put(self, device: Device) -> None:
        self._devices.append(device)

    def _is_beside(self, number: int) -> bool:
        return any(device.is_busy for other, device in enumerate(self._devices) if other != number)
