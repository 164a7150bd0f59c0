"""Every device converts vectors as the host does, bit for bit; a device's kernel as C++."""

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from core.errors import DeviceError
from core.kv import KVLayout
from device.convert import convert
from device.cuda import CudaDevice
from device.poller import Poller
from device.seam import ComputeDevice, Conversion, Copy, Region
from device.simulated import SimulatedDevice
from tests.contract.cuda_as_cpp import load_launch, no_kernel
from tests.contract.fake_cuda import FakeRuntime
from tests.contract.test_device import A_GPU, content_of

STORAGES = [
    *((dtype, "none") for dtype in ("float32", "float16", "bfloat16", "float8_e4m3fn")),
    *((dtype, "vector") for dtype in ("float32", "float8_e4m3fn", "int8")),
]
EIGHT_BITS = ("float8_e4m3fn", "int8")
NUM_VECTORS = 300


@pytest.fixture(params=["cuda", "simulated", A_GPU])
def device(request: pytest.FixtureRequest) -> Iterator[ComputeDevice]:
    match request.param:
        case "a GPU":
            yield CudaDevice(0)
        case "cuda":
            runtime = FakeRuntime()
            yield CudaDevice(0, runtime, load_launch)
            runtime.free_all()
        case _:
            made = SimulatedDevice(seed=6)
            yield made
            made.close()
            assert not made.violations


def layout(storage: tuple[str, str], width: int, kept: tuple[int, int] | None = None) -> KVLayout:
    """`kept`: of a latent, whose other numbers have a scale for each four."""
    dtype, scales = storage
    plain = KVLayout(num_layers=1, num_kv_heads=1, head_dim=width, block_size=4, dtype=dtype, scales=scales)
    return plain if kept is None else replace(plain, group=4, kept=kept)


def stored(kind: KVLayout, seed: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Vectors of all magnitudes, with zeros, what is too large, what is too small, and what lies half-way between two numbers of
    fewer bits."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((NUM_VECTORS, kind.head_dim)) * 10.0 ** rng.uniform(-9, 6, (NUM_VECTORS, 1))
    values[rng.random(values.shape) < 0.1] = 0
    values[3] = 0
    halves = rng.random(NUM_VECTORS) < 0.3
    values[halves] = np.ldexp(
        1 + rng.integers(0, 1 << 12, values.shape) / (1 << 12), rng.integers(-9, 9, values.shape)
    )[halves]
    values[rng.random(NUM_VECTORS) < 0.1] *= np.exp2(-12)
    floats = layout(("float32", "none"), kind.head_dim)
    return convert(floats, values.astype(np.float32).view(np.uint8).reshape(-1), None, kind)


def laid_out(device: ComputeDevice, content: np.ndarray) -> Region:
    pinned, region = device.pinned(content.nbytes), device.allocate(content.nbytes)
    device.host_view(pinned, write=True)[:] = content.view(np.uint8).data
    device.compute.copy([Copy(region, pinned)])
    return region


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    source=st.sampled_from(STORAGES),
    target=st.sampled_from(STORAGES),
    width=st.sampled_from([4, 16, 20]),
    kept=st.sampled_from([None, (4, 6), (12, 14)]),
    seed=st.integers(0, 100),
)
def test_scattered_vectors_become_what_the_host_makes_of_them(
    device: ComputeDevice,
    source: tuple[str, str],
    target: tuple[str, str],
    width: int,
    kept: tuple[int, int] | None,
    seed: int,
) -> None:
    """`kept`: in the middle of a latent, and at its end."""
    if kept is not None:
        width = 14
        assume(all(scales == "none" or dtype in EIGHT_BITS for dtype, scales in (source, target)))
    ours, theirs = layout(source, width, kept), layout(target, width, kept)
    rng, poller = random.Random(seed), Poller()
    data, scales = stored(ours, seed)
    cuts = sorted(rng.sample(range(NUM_VECTORS + 1), 2 * rng.randint(1, 6)))
    runs = np.array([(first, end - first) for first, end in zip(cuts[::2], cuts[1::2], strict=True)])
    rng.shuffle(pieces := runs.tolist())
    runs = np.array(pieces, np.int64)
    chosen = np.concatenate([np.arange(first, first + count) for first, count in pieces])
    packed = device.allocate(len(chosen) * theirs.vector_bytes)
    work = Conversion(
        source=ours,
        target=theirs,
        data=laid_out(device, data),
        scales=None if scales is None else laid_out(device, scales),
        runs=runs,
        packed=packed,
        packed_scales=device.allocate(theirs.scale_bytes * len(chosen)) if theirs.scale_bytes else None,
    )
    device.compute.convert(work)
    poller.wait([device.compute.record()])
    own = data.reshape(NUM_VECTORS, -1)[chosen].reshape(-1)
    if scales is not None:
        scales = scales.reshape(NUM_VECTORS, -1)[chosen].reshape(-1)
    want, new_scales = convert(ours, own, scales, theirs)
    assert content_of(device, packed, poller) == want.tobytes()
    if work.packed_scales is not None:
        assert new_scales is not None
        assert content_of(device, work.packed_scales, poller) == new_scales.tobytes()


@pytest.fixture
def without_kernels() -> Iterator[CudaDevice]:
    runtime = FakeRuntime()
    yield CudaDevice(0, runtime, no_kernel)
    runtime.free_all()


def test_what_cannot_be_compiled_is_said(without_kernels: CudaDevice) -> None:
    kind, region = layout(("float32", "none"), 4), without_kernels.allocate(64)
    work = Conversion(
        source=kind,
        target=kind,
        data=region,
        scales=None,
        runs=np.array([[0, 1]]),
        packed=region.part(16, 16),
        packed_scales=None,
    )
    with pytest.raises(DeviceError, match="KV cannot be converted on CUDA device 0: NVRTC is missing"):
        without_kernels.compute.convert(work)
