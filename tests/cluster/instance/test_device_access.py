"""Pools in the memory of devices, from prefill's last layer to decode's first step, over everything that an instance reaches them by."""

import asyncio
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from cluster.instance.device_access import device_access, loopback_access, take_device_memory
from cluster.instance.pool_access import PoolAccess
from cluster.instance.pull_media import device_media
from core.config.cluster_config import TransferConfig
from core.errors import ConfigError, OutOfMemory, TransferError
from core.kv import KVShard
from core.messages import Commit, RegionKey
from core.plan import KVPush
from core.types import TokenOut
from device.port import PoolMemory
from device.seam import Event
from device.simulated import SimulatedDevice
from engine.execution.pools.kv_pool import KVPool
from engine.execution.pools.resident_pool import ResidentPool
from engine.execution.runner import Runner
from kvtransfer.copies import CopyRun
from kvtransfer.inbox import Inbox
from kvtransfer.pusher import Pusher
from kvtransfer.source import Source
from kvtransfer.transport.base import Sender
from kvtransfer.transport.loopback_transport import LoopbackFabric
from models.causal_model import CausalModel
from models.registry import load_model
from net.channel import Identity
from tests.contract.gloo_group import gloo_medium
from tests.engine.execution.test_kv_dtype import BLOCKS, TEXT, FakeMail, rows_of, shard_of
from tests.models.checkpoints import CPU, FAMILIES, make
from tests.patience import PATIENCE_S

KEY, HOST = b"cluster key", "127.0.0.1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    folder = tmp_path_factory.mktemp("model")
    make(folder, FAMILIES["llama"](random.Random(3), 0), seed=1)
    return load_model(folder, "float32", CPU)


@pytest.fixture
def devices() -> Iterator[list[SimulatedDevice]]:
    made = [SimulatedDevice(seed=seed) for seed in (4, 5)]
    yield made
    for device in made:
        device.close()


def memory_for(device: SimulatedDevice, shard: KVShard) -> PoolMemory:
    return take_device_memory(device, shard.pool_bytes(BLOCKS + 1))


def access(way: str, name: str, memory: PoolMemory, shard: KVShard, fabric: LoopbackFabric) -> PoolAccess:
    num_bytes = shard.pool_bytes(BLOCKS + 1)
    if way == "loopback":
        return loopback_access(fabric, name, memory, num_bytes)
    me = Identity(name, name, os.getpid())
    kind = "nccl" if way == "collective" else "tcp"
    config = TransferConfig(transport=kind, checksum=way == "tcp, checked")
    media = {"nccl": gloo_medium} if way == "collective" else {}
    return device_access(config, me, HOST, key=KEY, memory=memory, num_bytes=num_bytes, media=media)


async def hand_over(
    model: CausalModel,
    way: str,
    kinds: tuple[str, str],
    devices: list[SimulatedDevice],
    wrap: Callable[[Source], Source] = lambda source: source,
    *,
    runs_out_at: int | None = None,
) -> torch.Tensor:
    """All but the last token are computed on one device, the last on another, or in another pool of the same one. Returns its logits.

    `runs_out_at`: the first device has no memory behind so many layers, and what was computed is computed again."""
    shards = shard_of(model, kinds[0], 4), shard_of(model, kinds[1], 8 if kinds[0] != kinds[1] else 4)
    blocks = (7, 1, 5) if shards[1].layout.block_size == 8 else (7, 1, 5, 0, 2)
    ends = (devices[0], devices[0] if way == "loopback" else devices[1])
    here, there = (memory_for(device, shard) for device, shard in zip(ends, shards, strict=True))
    fabric = LoopbackFabric()
    ours = access(way, "prefill", here, shards[0], fabric)
    theirs = access(way, "decode", there, shards[1], fabric)
    assert ours.source is not None
    source = wrap(ours.source)
    arrived: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    inbox = Inbox(
        shards[1],
        BLOCKS + 1,
        "decode",
        "d1",
        on_complete=lambda _: arrived.set_result(""),
        on_corrupted=arrived.set_result,
    )
    inbox.attach(theirs.make_receivers(inbox))
    grant = inbox.open("a", 0, "prefill", list(blocks), first_token=0, num_tokens=len(TEXT) - 1, ttl_s=60)
    mail = FakeMail()
    pusher = Pusher(shards[0], BLOCKS + 1, mail, ours.make_senders(), source=source, staging=ours.staging)
    pusher.open(grant, lambda _: None, lambda _: None, lambda _, why: arrived.set_result(why))
    runner = Runner(model, ResidentPool(shards[0], BLOCKS + 1, here, CPU), 4, pusher)
    push = KVPush(grant.id, 0, len(TEXT) - 1)
    if runs_out_at is not None:
        idle = asyncio.Event()
        devices[0].run_out((runs_out_at,))
        with pytest.raises(OutOfMemory):
            await asyncio.to_thread(rows_of, model, runner, 0, (3, 8, 2, 0, 6), push)
        pusher.when_idle(grant.id, idle.set)
        await idle.wait()
    await asyncio.to_thread(rows_of, model, runner, 0, (3, 8, 2, 0, 6), push)
    pusher.finish(grant.id, [TokenOut(request_id="a", attempt=0, index=0, token=5)])
    inbox.committed(next(message for message in mail.sent if isinstance(message, Commit)))
    async with asyncio.timeout(PATIENCE_S):
        failure = await arrived
    await pusher.close()
    await inbox.shut()
    if failure:
        raise TransferError(failure)
    size = shards[1].layout.block_size
    decode = Runner(model, ResidentPool(shards[1], BLOCKS + 1, there, CPU), size)
    return rows_of(model, decode, len(TEXT) - 1, blocks)


def alone(model: CausalModel) -> torch.Tensor:
    shard = shard_of(model, "float32", 4)
    pool = KVPool(shard, BLOCKS, memoryview(bytearray(shard.pool_bytes(BLOCKS))))
    return rows_of(model, Runner(model, pool, 4), 0, (1, 2, 3, 4, 5))


@pytest.mark.parametrize("way", ["tcp", "tcp, checked", "collective", "loopback"])
async def test_decode_goes_on_from_what_prefill_has_computed_on_another_device(
    way: str, model: CausalModel, devices: list[SimulatedDevice]
) -> None:
    got = await hand_over(model, way, ("float32", "float32"), devices)
    assert torch.allclose(got, alone(model), atol=1e-5)
    assert not [device.violations for device in devices if device.violations]


@pytest.mark.parametrize("way", ["tcp", "loopback"])
async def test_layers_that_a_step_without_memory_has_sent_are_sent_again(
    way: str, model: CausalModel, devices: list[SimulatedDevice]
) -> None:
    for num_layers in range(len(model.layers)):
        got = await hand_over(model, way, ("float32", "float32"), devices, runs_out_at=num_layers)
        assert torch.allclose(got, alone(model), atol=1e-5)
    assert not [device.violations for device in devices if device.violations]


@pytest.mark.parametrize("way", ["tcp", "collective", "loopback"])
async def test_kv_is_converted_on_its_device(
    way: str, model: CausalModel, devices: list[SimulatedDevice]
) -> None:
    got = await hand_over(model, way, ("float32", "int8"), devices)
    assert torch.cosine_similarity(got, alone(model), 0) > 0.995
    assert not [device.violations for device in devices if device.violations]


TRIED = threading.Event()


class TooEarly:
    """A Source that says of each layer that it is there."""

    def __init__(self, inner: Source) -> None:
        self._inner, self.close = inner, inner.close

    def mark(self) -> tuple[Event, ...]:
        return ()

    async def write(
        self,
        sender: Sender,
        grant_id: str,
        region: RegionKey,
        runs: Sequence[CopyRun],
        after: Sequence[Event],
    ) -> None:
        try:
            await self._inner.write(sender, grant_id, region, runs, after)
        finally:
            TRIED.set()


@pytest.mark.parametrize("way", ["tcp", "loopback"])
async def test_a_layer_that_is_sent_before_its_event_is_found_out(
    way: str, model: CausalModel, devices: list[SimulatedDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step goes on until the layer has been sent: its end would order everything."""
    TRIED.clear()
    finish = ResidentPool.finish

    def finish_late(pool: ResidentPool) -> None:
        assert TRIED.wait(PATIENCE_S)
        finish(pool)

    monkeypatch.setattr(ResidentPool, "finish", finish_late)
    with pytest.raises(TransferError, match="nothing orders that behind compute"):
        await hand_over(model, way, ("float32", "float32"), devices, TooEarly)


def test_memory_goes_back_with_its_last_user(devices: list[SimulatedDevice]) -> None:
    memory = take_device_memory(devices[0], 1 << 12)
    region = memory.region
    del memory
    with pytest.raises(Exception, match="no allocation"):
        devices[0].free(region)


async def test_what_moves_host_memory_alone_is_refused_by_name(devices: list[SimulatedDevice]) -> None:
    memory = take_device_memory(devices[0], 1 << 12)
    for transport in ("shm", "loopback", "nixl"):
        with pytest.raises(ConfigError, match=f"transport {transport} .* use auto, tcp"):
            device_access(
                TransferConfig(transport=transport),  # type: ignore[arg-type]
                Identity("a", "a", 1),
                HOST,
                key=KEY,
                memory=memory,
                num_bytes=1 << 12,
                media={},
            )


async def test_nccl_is_offered_where_it_is_asked_for_and_refused_by_name_without_its_torch(
    devices: list[SimulatedDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    memory, asked = take_device_memory(devices[0], 1 << 12), TransferConfig(transport="nccl")
    assert "nccl" not in device_media(TransferConfig(), devices[0])
    with pytest.raises(ConfigError, match="transport nccl needs NVIDIA GPUs and a CUDA build of torch"):
        device_access(
            asked,
            Identity("a", "a", 1),
            HOST,
            key=KEY,
            memory=memory,
            num_bytes=1 << 12,
            media=device_media(asked, devices[0]),
        )
