"""One suite over every device: copies, order between streams, and what the host may see of it."""

import asyncio
import contextlib
import gc
import os
import random
import sys
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch

from core.errors import ConfigError, DeviceError, OutOfMemory
from device import cuda
from device.cuda import CudaDevice
from device.poller import Poller
from device.port import HostPort, PoolMemory
from device.ring import PinnedRing, Slot
from device.seam import HOST, ComputeDevice, Copy, Region
from device.simulated import SimulatedDevice
from tests.contract.cuda_as_cpp import load_launch, no_kernel
from tests.contract.fake_cuda import CUDARuntimeError, FakeRuntime

NUM_BYTES = 1 << 12


A_GPU = pytest.param(
    "a GPU",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(
            not (torch.cuda.is_available() and cuda.has_cupy()), reason="needs a CUDA device and cupy"
        ),
    ],
)


@pytest.fixture(params=["cuda", "cuda, short copies one by one", "simulated", A_GPU])
def device(request: pytest.FixtureRequest) -> Iterator[ComputeDevice]:
    match request.param:
        case "a GPU":
            yield CudaDevice(0)
        case "cuda":
            runtime = FakeRuntime()
            yield CudaDevice(0, runtime, load_launch)
            runtime.free_all()
        case "cuda, short copies one by one":
            runtime = FakeRuntime()
            yield CudaDevice(0, runtime, no_kernel)
            runtime.free_all()
        case _:
            made = SimulatedDevice(seed=random.randrange(1000))
            yield made
            made.close()
            assert not made.violations


def filled(device: ComputeDevice, content: bytes) -> Region:
    pinned = device.pinned(len(content))
    device.host_view(pinned, write=True)[:] = content
    return pinned


class Never:
    """An event of work that does not end."""

    def query(self) -> bool:
        return False


def test_who_waits_for_work_for_so_long_is_told_that_it_has_not_ended() -> None:
    with pytest.raises(DeviceError, match="not ended within 0.01 s"):
        Poller().wait([Never()], 0.01)


def content_of(device: ComputeDevice, region: Region, poller: Poller) -> bytes:
    """Read memory that nothing works on."""
    stream, pinned = device.stream("look"), device.pinned(region.num_bytes)
    stream.copy([Copy(pinned, region)])
    poller.wait([stream.record()])
    found = bytes(device.host_view(pinned, write=False))
    stream.close()
    device.free(pinned)
    return found


def test_new_memory_is_zeroed(device: ComputeDevice) -> None:
    assert content_of(device, device.allocate(NUM_BYTES), Poller()) == bytes(NUM_BYTES)
    assert bytes(device.host_view(device.pinned(NUM_BYTES), write=False)) == bytes(NUM_BYTES)


def test_copies_of_one_stream_are_made_in_order(device: ComputeDevice) -> None:
    first, second = os.urandom(NUM_BYTES), os.urandom(NUM_BYTES)
    there, stream = device.allocate(NUM_BYTES), device.stream("copies")
    for content in (first, second):
        stream.copy([Copy(there, filled(device, content))])
    half = NUM_BYTES // 2
    stream.copy([Copy(there.part(0, half), there.part(half, half))])
    poller = Poller()
    poller.wait([stream.record()])
    assert content_of(device, there, poller) == second[half:] * 2
    stream.close()


def test_a_stream_that_waits_for_an_event_sees_what_was_before_it(device: ComputeDevice) -> None:
    poller, content = Poller(), os.urandom(NUM_BYTES)
    streams = [device.stream(str(number)) for number in range(4)]
    places = [filled(device, content), *(device.allocate(NUM_BYTES) for _ in streams)]
    for number, stream in enumerate(streams):
        stream.copy([Copy(places[number + 1], places[number])])
        if number + 1 < len(streams):
            streams[number + 1].wait(stream.record())
    poller.wait([streams[-1].record()])
    assert content_of(device, places[-1], poller) == content
    for stream in streams:
        stream.close()


def test_a_region_has_no_bytes_outside(device: ComputeDevice) -> None:
    region = device.allocate(NUM_BYTES)
    for start, num_bytes in ((-1, 4), (NUM_BYTES, 1), (8, NUM_BYTES)):
        with pytest.raises(DeviceError, match="outside"):
            region.part(start, num_bytes)
    device.free(region)


async def test_a_loop_is_told_when_work_is_done(device: ComputeDevice) -> None:
    poller, content = Poller(), os.urandom(NUM_BYTES)
    there, back, stream = device.allocate(NUM_BYTES), device.pinned(NUM_BYTES), device.stream("copies")
    stream.copy([Copy(there, filled(device, content)), Copy(back, there)])
    await poller.done([stream.record()])
    assert bytes(device.host_view(back, write=False)) == content
    stream.close()


@pytest.mark.parametrize("slot_bytes", [64, 300, 1 << 14])
def test_what_goes_in_through_a_port_comes_out_of_it(device: ComputeDevice, slot_bytes: int) -> None:
    """Slots may have any size: ranges are cut, and slots are filled again while others are copied."""
    memory = PoolMemory(device, device.allocate(NUM_BYTES), Poller())
    port = HostPort(memory, "port", slot_bytes)
    expected = bytearray(NUM_BYTES)
    rng = random.Random(slot_bytes)
    for _ in range(8):
        ranges = [(start, rng.randrange(4, 256, 4)) for start in range(0, NUM_BYTES, 256)]
        rng.shuffle(ranges)

        def fill(slot: Slot, part: list[tuple[int, int]]) -> None:
            for (start, size), piece in zip(part, slot.pieces([n for _, n in part], write=True), strict=True):
                piece[:] = expected[start : start + size] = rng.randbytes(size)

        port.write(ranges, fill)
        found = bytearray()
        port.read(ranges, found.extend)
        assert found == b"".join(expected[start : start + size] for start, size in ranges)
    assert content_of(device, memory.region, memory.poller) == expected
    port.close()


async def test_a_ring_serves_whoever_asked_first_and_forgets_who_has_gone(device: ComputeDevice) -> None:
    ring = PinnedRing(device, 64, 1)
    slot = ring.take()
    gone, stays = (asyncio.create_task(ring.taken()) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone])
    assert not stays.done()
    ring.give_back(slot)
    assert await stays == slot
    ring.close()
    ring.give_back(slot)


def test_cuda_without_cupy_or_a_driver_is_refused_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match="pip install cupy-cuda13x"):
        CudaDevice(0)
    runtime = FakeRuntime()
    with pytest.raises(ConfigError, match="no CUDA device 1 here.*InvalidDevice"):
        CudaDevice(1, runtime)


def test_work_that_failed_on_a_gpu_is_an_error_for_whoever_asks() -> None:
    runtime = FakeRuntime()
    device, poller = CudaDevice(0, runtime), Poller()
    stream = device.stream("copies")
    event = stream.record()
    runtime.failed = 700
    with pytest.raises(DeviceError, match="device 0 failed with error 700"):
        poller.wait([event])
    runtime.failed = 0
    del event
    gc.collect()
    stream.close()
    assert not runtime.open_events
    assert not runtime.open_streams
    runtime.free_all()


@pytest.mark.parametrize(("status", "is_lost"), [(716, True), (1, False)])
def test_what_is_given_back_after_a_gpu_was_lost_fails_no_more(
    status: int, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing would hide the error that those who computed have been told."""
    runtime = FakeRuntime()
    device = CudaDevice(0, runtime)
    stream, region = device.stream("copies"), device.allocate(64)

    def refuse(*arguments: object) -> None:
        raise CUDARuntimeError(status, "cudaErrorMisalignedAddress: misaligned address")

    for name in ("streamSynchronize", "free"):
        monkeypatch.setattr(runtime, name, refuse)
    for give_back in (stream.close, lambda: device.free(region)):
        with contextlib.nullcontext() if is_lost else pytest.raises(DeviceError, match="misaligned"):
            give_back()
    with pytest.raises(DeviceError, match="misaligned"):
        device.allocate(64)
    monkeypatch.undo()
    runtime.free_all()


def test_zeros_overwrite_nothing_that_is_put_into_new_memory_while_a_model_computes() -> None:
    runtime = FakeRuntime()
    device, runtime.busy = CudaDevice(0, runtime), True
    there, stream = device.allocate(64), device.stream("step inputs")
    stream.copy([Copy(there, filled(device, b"kv" * 32))])
    runtime.end_step()
    assert content_of(device, there, Poller()) == b"kv" * 32
    stream.close()
    runtime.free_all()


def test_what_a_gpu_has_no_memory_for_is_told_apart_from_other_errors() -> None:
    runtime = FakeRuntime()
    device, runtime.largest = CudaDevice(0, runtime), 64
    with pytest.raises(OutOfMemory, match="malloc: cudaErrorMemoryAllocation"):
        device.allocate(65)
    with pytest.raises(DeviceError, match="ipcOpenMemHandle") as other:
        device.open(bytes(64), 64)
    assert not isinstance(other.value, OutOfMemory)
    device.free(device.allocate(64))
    runtime.free_all()


def test_memory_is_shared_by_a_handle_and_how_far_into_it() -> None:
    runtime = FakeRuntime()
    device, peer = CudaDevice(0, runtime), CudaDevice(0, FakeRuntime())
    pool = device.allocate(NUM_BYTES).part(256, 512)
    handle, offset = device.export(pool)
    there = peer.open(handle, offset + pool.num_bytes).part(offset, pool.num_bytes)
    device.compute.copy([Copy(pool, filled(device, b"kv" * 256))])
    assert content_of(peer, there, Poller()) == b"kv" * 256
    with pytest.raises(DeviceError, match="allocated here"):
        device.export(Region(0, 4096, 4))
    with pytest.raises(DeviceError, match="64 bytes"):
        peer.open(b"short", 4)
    runtime.free_all()


def test_every_call_that_is_made_is_one_of_cupys() -> None:
    runtime = pytest.importorskip("cupy.cuda.runtime")
    ours = [
        name
        for name in dir(FakeRuntime)
        if not name.startswith("_") and name not in ("view", "free_all", "end_step")
    ]
    assert not [name for name in ours if not hasattr(runtime, name)]
    assert cuda.load_runtime() is runtime


def test_kernels_are_compiled_by_the_standard_that_they_are_written_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NVRTC refuses fractions in hexadecimal by C++14, which cupy asks for where nobody says otherwise."""
    cupy = Mock()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    cuda.load_launch("source", "name")
    cupy.RawKernel.assert_called_once_with("source", "name", options=("-std=c++17",))


def test_the_host_cannot_reach_a_gpus_memory() -> None:
    simulated = SimulatedDevice()
    runtime = FakeRuntime()
    for device in (simulated, CudaDevice(0, runtime)):
        region = device.allocate(64)
        assert region.device != HOST
        with pytest.raises(DeviceError, match="cannot reach"):
            device.host_view(region, write=False)
    simulated.close()
    runtime.free_all()
