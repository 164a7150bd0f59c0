"""KV over TLS: both sides show a certificate of the cluster's authority, or nothing is moved."""

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from core.errors import BatonError, ProtocolError, ReplicaLost
from core.kv import KVLayout, KVShard
from kvtransfer.copies import CopyRun
from kvtransfer.transport import streams
from kvtransfer.transport.tcp import TcpReceiver, TcpSender
from kvtransfer.transport.write_admission import WriteAdmission
from net.channel import Identity
from net.tls import FileTls, SecretTls, Tls
from tests.authority import Authority
from tests.far_host import FAR
from tests.net.recording_relay import recording_relay
from tests.patience import PATIENCE_S, until

KEY = b"cluster key"
SHARD = KVShard.whole(KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32"))
SIZE = 3 << 20
WHOLE = [CopyRun(0, 0, SIZE)]


class Side:
    def __init__(self, tls: Tls | None) -> None:
        self.pool = memoryview(bytearray(SIZE))
        self.num_bytes = 0
        admission = WriteAdmission(lambda *_: True, self.arrived, lambda _: None)
        me = Identity("holder", "h", os.getpid())
        self.receiver = TcpReceiver(KEY, me, FAR, self.pool, admission, tls)
        self.region = self.receiver.region(SHARD, SIZE // SHARD.block_bytes)

    def arrived(self, _: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes


def sender(tls: Tls | None, source: bytes = bytes(SIZE), *, checksum: bool = False) -> TcpSender:
    me = Identity("writer", "w", os.getpid())
    return TcpSender(KEY, me, memoryview(bytearray(source)), tls, checksum=checksum, num_streams=2)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "cluster")


@pytest.fixture
async def holder() -> AsyncIterator[Side]:
    side = Side(SecretTls(KEY))
    yield side
    await side.receiver.close()


@pytest.mark.parametrize("kind", ["auto", "files", "off"])
@pytest.mark.parametrize("checksum", [False, True])
async def test_kv_arrives_and_cannot_be_read_on_the_way(
    authority: Authority, kind: str, checksum: bool
) -> None:
    ways: dict[str, tuple[Tls | None, Tls | None]] = {
        "auto": (SecretTls(KEY), SecretTls(KEY)),
        "files": (FileTls(*authority.member("holder")), FileTls(*authority.member("writer"))),
        "off": (None, None),
    }
    source = b"secret prompt   " * (SIZE // 16)
    holder, out = Side(ways[kind][0]), sender(ways[kind][1], source, checksum=checksum)
    async with recording_relay(holder.region.endpoint) as (address, wire):
        region = replace(holder.region, endpoint=address)
        assert out.reaches(region)
        await out.write("g", region, WHOLE)
        async with asyncio.timeout(PATIENCE_S):
            while holder.num_bytes < SIZE:
                await asyncio.sleep(0.005)
        assert holder.pool == source
        assert sum(map(len, wire)) > SIZE
        assert any(b"secret" in data for data in wire) is (kind == "off")
        await out.close()
        await holder.receiver.close()


async def refusal(out: TcpSender, holder: Side) -> str:
    """What the writer hears. Nothing has arrived."""
    with pytest.raises(BatonError) as caught:
        await out.write("g", holder.region, WHOLE)
    assert not holder.num_bytes
    await out.close()
    return str(caught.value)


async def test_a_writer_of_another_cluster_is_refused(holder: Side) -> None:
    assert "not of this cluster's authority" in await refusal(sender(SecretTls(b"another")), holder)


async def test_plain_and_encrypted_instances_do_not_meet(
    holder: Side, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Side(None)
    assert "takes TLS alone" in await refusal(sender(None), holder)
    await until(lambda: "refused a KV writer: the peer at 127.0.0.1 speaks no TLS" in caplog.text)
    assert "does not speak TLS" in await refusal(sender(SecretTls(KEY)), plain)
    await until(lambda: "refused a KV writer: the peer speaks TLS" in caplog.text)
    await plain.receiver.close()


async def test_the_fence_cuts_an_encrypted_stream(holder: Side) -> None:
    out = sender(SecretTls(KEY))
    await out.write("g", holder.region, WHOLE)
    async with asyncio.timeout(PATIENCE_S):
        await holder.receiver.fence("writer", "g")

    async def write_often() -> None:
        for _ in range(50):
            await out.write("g", holder.region, WHOLE)

    with pytest.raises(ReplicaLost):
        await write_often()
    await out.close()


async def test_a_peer_that_never_says_hello_does_not_keep_the_holder_from_closing(holder: Side) -> None:
    host, port = holder.region.endpoint.split(":")
    silent = socket.create_connection((host, int(port)))
    async with asyncio.timeout(PATIENCE_S):
        await holder.receiver.close()
    silent.close()


async def test_a_sender_that_closes_while_it_shakes_hands_leaves_no_connection(holder: Side) -> None:
    with socket.create_server((FAR, 0)) as silent:
        out = sender(SecretTls(KEY))
        endpoint = f"{FAR}:{silent.getsockname()[1]}"
        writing = asyncio.create_task(out.write("g", replace(holder.region, endpoint=endpoint), WHOLE))
        accepted, _ = await asyncio.to_thread(silent.accept)
        await out.close()
        with pytest.raises(asyncio.CancelledError):
            await writing
        accepted.settimeout(PATIENCE_S)
        with accepted:
            while await asyncio.to_thread(accepted.recv, 4096):
                pass


async def test_a_holder_that_stops_reading_counts_as_lost(
    holder: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "STALL_S", 0.2)
    out, may_read = sender(SecretTls(KEY), checksum=True), threading.Event()
    monkeypatch.setattr(streams.Stream, "receive", _late(streams.Stream.receive, may_read))
    with pytest.raises(ReplicaLost, match="has not answered"):
        await out.write("g", holder.region, WHOLE)
    may_read.set()
    await out.close()


def _late(receive: object, may: threading.Event) -> object:
    """The holder reads only then. Its streams are those that were accepted, on threads of their own."""

    def wait(self: object, targets: object) -> None:
        if threading.current_thread().name.startswith("kv from"):
            may.wait(PATIENCE_S)
        receive(self, targets)  # type: ignore[operator]

    return wait


async def test_new_connections_take_certificates_that_were_renewed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authorities = [Authority(tmp_path, name) for name in ("old", "new")]
    files = [tmp_path / name for name in ("cert", "key", "ca")]

    def renew(authority: Authority) -> None:
        for file, made in zip(files, authority.member("holder"), strict=True):
            file.write_bytes(Path(made).read_bytes())

    renew(authorities[0])
    holder = Side(FileTls(*map(str, files)))

    async def write(authority: Authority) -> None:
        out = sender(FileTls(*authority.member("writer")))
        try:
            await out.write("g", holder.region, WHOLE)
        finally:
            await out.close()

    await write(authorities[0])
    with pytest.raises(ProtocolError):
        await write(authorities[1])
    renew(authorities[1])
    await write(authorities[1])
    files[1].write_text("half a key")
    await write(authorities[1])
    assert "the changed certificate is refused, the old one holds" in caplog.text
    await holder.receiver.close()
