"""Which ways to its pool an instance opens, and what it refuses at start-up, by name."""

import os
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.instance import pool_access
from cluster.instance.pool_access import remote_access
from core.config.cluster_config import TransferConfig
from core.config.security_config import SecurityConfig
from core.errors import ConfigError
from core.kv import KVLayout, KVShard
from kvtransfer.inbox import Inbox
from kvtransfer.transport.nixl import available
from kvtransfer.wire import unpack
from net.mail import TcpMail

SHARD = KVShard.whole(KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32"))
BLOCKS = 8
KEY, HOST = b"key", "127.0.0.1"


@pytest.fixture
async def mail() -> AsyncIterator[TcpMail]:
    made = TcpMail(KEY)
    made.listen(lambda *_: None, lambda _: None)
    yield made
    await made.close()


async def ways(mail: TcpMail, **settings: Any) -> tuple[set[str], set[str]]:
    """The transports that a decode instance offers and that a prefill instance has."""
    config = TransferConfig(**settings)
    size = SHARD.pool_bytes(BLOCKS)
    decode = remote_access(config, mail.me, HOST, receives=True, key=KEY, num_bytes=size)
    prefill = remote_access(config, mail.me, HOST, receives=False, key=KEY, num_bytes=size)
    inbox = Inbox(
        SHARD,
        BLOCKS,
        mail.address,
        "i",
        on_complete=lambda _: None,
        on_corrupted=lambda _: None,
        model="rev7",
    )
    inbox.attach(decode.make_receivers(inbox))
    regions = inbox.regions()
    senders = prefill.make_senders()
    assert {unpack(region.content).model for region in regions} == {"rev7"}
    assert len(prefill.buffer) == len(decode.buffer) == size
    assert all(any(sender.reaches(region) for region in regions) for sender in senders)
    await inbox.shut()
    for sender in senders:
        await sender.close()
    return {region.transport for region in regions}, {sender.name for sender in senders}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_one_way_can_be_forced(mail: TcpMail, transport: str) -> None:
    assert await ways(mail, transport=transport) == ({transport}, {transport})


@pytest.mark.skipif(not available(), reason="the nixl extra is not installed")
async def test_nixl_can_be_forced(mail: TcpMail) -> None:
    assert await ways(mail, transport="nixl") == ({"nixl"}, {"nixl"})


async def test_auto_opens_shared_memory_and_tcp(mail: TcpMail) -> None:
    offered, _ = await ways(mail)
    assert offered >= {"shm", "tcp"}
    assert offered <= {"shm", "tcp", "nixl"}


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"transport": "loopback"}, "one process only"),
        ({"transport": "nccl"}, "nccl moves KV pools in GPU memory.*use auto, shm, tcp or nixl"),
        ({"transport": "cuda_ipc"}, "cuda_ipc moves KV pools in GPU memory"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(mail: TcpMail, settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        remote_access(TransferConfig(**settings), mail.me, HOST, receives=False, key=KEY, num_bytes=1 << 16)


@pytest.mark.parametrize("strict", [False, True])
async def test_auto_offers_nothing_unencrypted_where_that_is_refused(
    mail: TcpMail, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    """NIXL's own memory is not needed: what is offered is decided before."""
    made: list[Any] = []
    monkeypatch.setattr(pool_access, "available", lambda: True)
    monkeypatch.setattr(pool_access, "has_rdma", lambda: True)
    monkeypatch.setattr(pool_access, "NixlMedium", made.append)
    monkeypatch.setattr(pool_access, "RegisteredMemory", SimpleNamespace(of=lambda memory: memory))
    config, security = TransferConfig(), SecurityConfig(strict=strict)
    remote_access(config, mail.me, HOST, receives=False, key=KEY, num_bytes=1 << 16, security=security)
    assert bool(made) is not strict


async def test_no_segment_is_left(mail: TcpMail) -> None:
    before = set(os.listdir("/dev/shm"))
    await ways(mail)
    assert set(os.listdir("/dev/shm")) - before == set()
