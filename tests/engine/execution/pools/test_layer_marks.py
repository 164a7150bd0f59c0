"""What says of a replay's layers that they are written says it when they are, and never of the replay before."""

from collections.abc import Iterator

import pytest

from core.errors import DeviceError
from device.seam import Event
from device.simulated import SimulatedDevice
from engine.execution.pools.layer_marks import LayerMarks
from tests.models.checkpoints import CPU

FIRST = 3


class Endless:
    """An Event of work that is never seen to be done."""

    def query(self) -> bool:
        return False


class Failed:
    """An Event of work that has failed."""

    def query(self) -> bool:
        raise DeviceError("an illegal address")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    device = SimulatedDevice()
    monkeypatch.setattr(device.compute, "record", Endless)
    yield device
    device.close()


def replay(marks: LayerMarks, num_layers: int) -> Iterator[int]:
    """Do what a capture has launched. Yields how many layers it has written, after each."""
    marks.begin()
    for index in range(num_layers):
        marks.written(FIRST + index)
        yield index + 1


def captured(device: SimulatedDevice, num_layers: int) -> LayerMarks:
    marks = LayerMarks(device, CPU, range(FIRST, FIRST + num_layers))
    for _ in range(3):
        assert [*replay(marks, num_layers)]
    marks.captured()
    return marks


def seen(events: list[Event]) -> list[bool]:
    return [event.query() for event in events]


def test_a_layer_is_written_when_its_replay_has_marked_it(device: SimulatedDevice) -> None:
    """Launches for captures have marked all layers before."""
    marks = captured(device, 4)
    for _ in range(2):
        events = marks.events(marks.launches())
        assert seen(events) == [False] * 4
        for num_written in replay(marks, 4):
            assert seen(events) == [True] * num_written + [False] * (4 - num_written)


def test_the_marks_of_one_replay_say_nothing_of_the_next_which_is_launched_behind_it(
    device: SimulatedDevice,
) -> None:
    marks = captured(device, 4)
    first, second = (marks.events(marks.launches()) for _ in range(2))
    for num_written in replay(marks, 4):
        assert seen(first) == [True] * num_written + [False] * (4 - num_written)
        assert seen(second) == [False] * 4
    for num_written in replay(marks, 4):
        assert seen(first) == [True] * 4
        assert seen(second) == [True] * num_written + [False] * (4 - num_written)


@pytest.mark.parametrize("num_layers", [1, 16, 17, 40, 61])
def test_of_many_layers_none_is_said_to_be_written_before_it_is_and_all_are_in_the_end(
    num_layers: int, device: SimulatedDevice
) -> None:
    marks = captured(device, num_layers)
    events, most_behind = marks.events(marks.launches()), 0
    for num_written in replay(marks, num_layers):
        num_seen = sum(seen(events))
        assert seen(events) == [True] * num_seen + [False] * (num_layers - num_seen)
        assert num_seen <= num_written
        most_behind = max(most_behind, num_written - num_seen)
    assert all(seen(events))
    assert len({*map(id, events)}) <= 16
    assert most_behind == -(-num_layers // 16) - 1


def test_what_asks_hears_of_a_replay_that_has_failed(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = captured(device, 2)
    monkeypatch.setattr(device.compute, "record", Failed)
    (event, _) = marks.events(marks.launches())
    with pytest.raises(DeviceError, match="an illegal address"):
        event.query()
