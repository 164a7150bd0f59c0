"""A card that devices of the coarse simulation share: what each of them asks for of its bandwidth while it runs."""

from sim.coarse.device import Device
from sim.cost import SharedCost, SharedStep


class Card:
    def __init__(self) -> None:
        self._steps: list[SharedStep] = []
        self._devices: list[Device] = []

    def step(self, cost: SharedCost) -> SharedStep:
        """Return the steps of the device that is `put` here next."""
        number = len(self._steps)
        self._steps.append(SharedStep(cost, lambda: self._demand_beside(number)))
        return self._steps[-1]

    def put(self, device: Device) -> None:
        self._devices.append(device)

    def _demand_beside(self, number: int) -> float | None:
        demands = [
            step.demand
            for other, (step, device) in enumerate(zip(self._steps, self._devices, strict=False))
            if other != number and device.is_busy
        ]
        return sum(demands) if demands else None
