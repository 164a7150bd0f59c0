"""Short copies that are made by one launch move the bytes that copies one by one would move."""

import os
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import DeviceError
from device.cuda import CudaDevice
from device.many_copies import MAX_MEAN_BYTES, MIN_COPIES, NAME, SOURCE, Launch, ManyCopies, cut
from device.seam import Copy, Region
from tests.contract.cuda_as_cpp import load_launch
from tests.contract.fake_cuda import FakeRuntime


@settings(max_examples=60, deadline=None)
@given(
    unit=st.sampled_from([1, 4, 16]),
    sizes=st.lists(st.integers(0, 40_000 // 16), min_size=MIN_COPIES, max_size=40),
    seed=st.integers(0, 1000),
)
def test_scattered_pieces_arrive_and_nothing_else_changes(unit: int, sizes: list[int], seed: int) -> None:
    """Places and sizes are multiples of `unit` bytes, so that each width of words is used."""
    rng, runtime = random.Random(seed), FakeRuntime()
    device = CudaDevice(0, runtime, load_launch)
    total = sum(sizes) * unit + (len(sizes) + 1) * 48
    source, there = device.allocate(total), device.pinned(total)
    content = os.urandom(total)
    runtime.view(source.address)[:] = content
    expected, at, copies = bytearray(total), 0, list[Copy]()
    for size in sizes:
        at += rng.randrange(0, 48, unit)
        taken = rng.randrange(0, total - size * unit + 1, unit)
        copies.append(Copy(there.part(at, size * unit), source.part(taken, size * unit)))
        expected[at : at + size * unit] = content[taken : taken + size * unit]
        at += size * unit
    stream = device.stream("copies")
    stream.copy(copies)
    assert bytes(device.host_view(there, write=False)) == expected
    stream.close()
    runtime.free_all()


def counted(launches: list[int]) -> Launch:
    run = load_launch(SOURCE, NAME)

    def launch(programs: int, threads: int, arguments: Sequence[np.generic], stream: int) -> None:
        launches.append(int(arguments[1]))
        run(programs, threads, arguments, stream)

    return launch


def copies_of(device: CudaDevice, count: int, num_bytes: int) -> list[Copy]:
    source, there = device.allocate(count * num_bytes), device.allocate(count * num_bytes)
    return [
        Copy(there.part(at * num_bytes, num_bytes), source.part(at * num_bytes, num_bytes))
        for at in range(count)
    ]


def test_few_or_long_copies_are_left_to_the_copy_engine() -> None:
    launches, runtime = list[int](), FakeRuntime()
    device = CudaDevice(0, runtime, lambda *_: counted(launches))
    device.compute.copy(copies_of(device, MIN_COPIES - 1, 64))
    device.compute.copy(copies_of(device, MIN_COPIES, MAX_MEAN_BYTES + 16))
    assert not launches
    device.compute.copy(copies_of(device, MIN_COPIES, 64))
    assert launches == [MIN_COPIES]
    runtime.free_all()


def test_a_list_is_not_written_again_before_its_kernel_is_done() -> None:
    class Pending:
        done = False

        def query(self) -> bool:
            return self.done

    lists, runtime = list[int](), FakeRuntime()
    device = CudaDevice(0, runtime, load_launch)
    many = ManyCopies(device, lambda programs, threads, arguments, stream: lists.append(int(arguments[0])))
    first, second = Pending(), Pending()
    many.copy(copies_of(device, 8, 64), 0, lambda: first)
    many.copy(copies_of(device, 8, 64), 0, lambda: second)
    second.done = True
    many.copy(copies_of(device, 8, 64), 0, Pending)
    assert lists[0] != lists[1] == lists[2]
    runtime.free_all()


def test_a_long_copy_is_cut_and_an_empty_one_is_nothing() -> None:
    def copy(at: int, num_bytes: int) -> Copy:
        return Copy(Region(0, 1 << 40 | at, num_bytes), Region(0, at, num_bytes))

    to, source, sizes = cut([copy(0, 40_000), copy(65_536, 0), copy(1 << 20, 16)])
    assert sizes.tolist() == [16_384, 16_384, 40_000 - 32_768, 16]
    assert source.tolist() == [0, 16_384, 32_768, 1 << 20]
    assert (to - source).tolist() == [1 << 40] * 4


def test_a_launch_that_fails_is_a_device_error_and_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(source: str, name: str) -> Launch:
        def launch(programs: int, threads: int, arguments: Sequence[np.generic], stream: int) -> None:
            raise RuntimeError("CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure")

        return launch

    runtime = FakeRuntime()
    device = CudaDevice(0, runtime, failing)
    copies, pinned, lists = copies_of(device, 8, 64), device.pinned, list[Region]()

    def watched(num_bytes: int) -> Region:
        lists.append(pinned(num_bytes))
        return lists[-1]

    monkeypatch.setattr(device, "pinned", watched)
    for _ in range(3):
        with pytest.raises(DeviceError, match="copy_pieces: CUDA_ERROR_LAUNCH_FAILED"):
            device.compute.copy(copies)
    assert len(lists) == 1, "the list is used again"
    runtime.free_all()
