"""Where a step's inputs and results lie on a device, and what the host reads of them."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from device.poller import Poller
from device.seam import Region
from device.simulated import SimulatedDevice
from engine.execution.batch.step_memory import StepMemory
from tests.models.checkpoints import CPU


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    device = SimulatedDevice()
    yield device
    device.close()


def test_results_of_several_types_are_read_as_they_were_given_and_lie_aligned(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's kernels read and write numbers at multiples of their size alone."""
    offsets: list[int] = []
    steps, array = StepMemory(device, CPU, 8), device.array

    def watched(region: Region) -> object:
        offsets.append(region.address % 16)
        return array(region)

    monkeypatch.setattr(device, "array", watched)
    results = [
        torch.tensor([7]),
        torch.tensor([-0.5]),
        torch.tensor([[-0.5, -1.5]]),
        torch.tensor([[7, 1 << 40]]),
    ]
    step = steps.begin()
    assert step.upload([np.arange(3, dtype=np.int32)])[0].tolist() == [0, 1, 2]
    step.give(results)
    Poller().wait([step.end()])
    assert step.read() == [result.tolist() for result in results]
    assert offsets
    assert not any(offsets)
    steps.close()
    assert not device.violations
