"""The simulated device finds what nobody has ordered, and nothing else."""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import Bug, OutOfMemory
from device.poller import Poller
from device.seam import Copy, Region
from device.simulated import SimulatedDevice


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    made = SimulatedDevice(seed=5)
    yield made
    made.close()


def to_device(device: SimulatedDevice) -> tuple[Region, Region]:
    return device.allocate(64), device.pinned(64)


def read_by_another_stream(device: SimulatedDevice) -> None:
    there, here = to_device(device)
    device.stream("a").copy([Copy(there, here)])
    device.stream("b").copy([Copy(device.pinned(64), there)])


def overwritten_by_another_stream(device: SimulatedDevice) -> None:
    there, here = to_device(device)
    device.stream("a").copy([Copy(there, here)])
    device.stream("b").copy([Copy(there, device.pinned(64))])


def written_while_another_stream_reads(device: SimulatedDevice) -> None:
    there, here = to_device(device)
    device.stream("a").copy([Copy(here, there)])
    device.stream("b").copy([Copy(there, device.pinned(64))])


def read_by_the_host_too_soon(device: SimulatedDevice) -> None:
    there, here = to_device(device)
    device.stream("a").copy([Copy(here, there)])
    device.host_view(here, write=False)


def refilled_by_the_host_too_soon(device: SimulatedDevice) -> None:
    there, here = to_device(device)
    device.stream("a").copy([Copy(there, here)])
    device.host_view(here, write=True)


def computed_on_too_soon(device: SimulatedDevice) -> None:
    there, here = to_device(device)
    device.stream("a").copy([Copy(there, here)])
    device.compute.uses([there.part(60, 4)], [])


def ordered_behind_the_wrong_work(device: SimulatedDevice) -> None:
    there, here = to_device(device)
    a, b = device.stream("a"), device.stream("b")
    early = a.record()
    a.copy([Copy(there, here)])
    b.wait(early)
    b.copy([Copy(device.pinned(64), there)])


RACES = [
    read_by_another_stream,
    overwritten_by_another_stream,
    written_while_another_stream_reads,
    read_by_the_host_too_soon,
    refilled_by_the_host_too_soon,
    computed_on_too_soon,
    ordered_behind_the_wrong_work,
]


@pytest.mark.parametrize("race", RACES, ids=lambda race: race.__name__)
def test_what_nobody_has_ordered_is_found(
    device: SimulatedDevice, race: Callable[[SimulatedDevice], None]
) -> None:
    with device.held(), pytest.raises(Bug, match="nothing orders that"):
        race(device)
    assert len(device.violations) == 1


def test_neighbouring_bytes_are_no_conflict(device: SimulatedDevice) -> None:
    there, here = to_device(device)
    device.stream("a").copy([Copy(there.part(0, 32), here.part(0, 32))])
    device.stream("b").copy([Copy(there.part(32, 32), here.part(32, 32))])
    assert not device.violations


def test_order_is_handed_on_from_event_to_event(device: SimulatedDevice) -> None:
    there, here = to_device(device)
    a, b, c = (device.stream(name) for name in "abc")
    a.copy([Copy(there, here)])
    b.wait(a.record())
    c.wait(b.record())
    c.copy([Copy(here, there)])
    Poller().wait([c.record()])
    device.host_view(here, write=True)
    assert not device.violations


def test_chosen_allocations_find_no_memory(device: SimulatedDevice) -> None:
    there, _ = to_device(device)
    device.run_out((1, 2))
    device.compute.uses([], [there])
    with pytest.raises(OutOfMemory, match="allocation 1"):
        device.allocate(64)
    with pytest.raises(OutOfMemory, match="allocation 2"):
        device.compute.uses([there], [])
    device.compute.uses([there], [device.allocate(64)])


def test_an_address_of_the_device_is_not_one_of_the_hosts(device: SimulatedDevice) -> None:
    assert device.allocate(4).address >= 1 << 48


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("copy"), st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("record"), st.integers(0, 2)),
        st.tuples(st.just("wait"), st.integers(0, 2), st.integers(0, 9)),
        st.tuples(st.just("see"), st.integers(0, 9)),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_what_it_finds_is_what_the_order_of_events_says(steps: list[tuple[str, int]]) -> None:
    """Against the transitive closure of program order, record and wait, computed by brute force."""
    device, poller = SimulatedDevice(seed=1), Poller()
    streams = [device.stream(str(number)) for number in range(3)]
    places = [device.allocate(16) for _ in range(4)]
    before: dict[int, set[int]] = {}
    """All that is ordered before each piece of work."""
    last: list[set[int]] = [set() for _ in streams]
    host: set[int] = set()
    events: list[tuple[object, set[int]]] = []
    done: list[tuple[int, int, int]] = []
    try:
        for number, (what, *rest) in enumerate(steps):
            match what, rest:
                case "copy", [stream, source, target]:
                    if source == target:
                        continue
                    before[number] = last[stream] | host
                    races = any(
                        other not in before[number] and (target in (read, written) or source == written)
                        for other, read, written in done
                    )
                    try:
                        streams[stream].copy([Copy(places[target], places[source])])
                        found = False
                    except Bug:
                        found = True
                    assert found == races
                    if found:
                        return
                    done.append((number, source, target))
                    last[stream] = before[number] | {number}
                case "record", [stream]:
                    events.append((streams[stream].record(), last[stream] | host))
                case "wait", [stream, event] if event < len(events):
                    streams[stream].wait(events[event][0])
                    last[stream] = last[stream] | events[event][1]
                case "see", [event] if event < len(events):
                    poller.wait([events[event][0]])
                    host |= events[event][1]
                case _:
                    pass
    finally:
        device.close()
