"""Connections that leave a host are encrypted, and both sides say why they refuse one."""

import asyncio
import os
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgpack
import pytest
import uvloop

from core.config.security_config import SecurityConfig
from core.errors import ConfigError, ProtocolError, ReplicaLost
from core.messages import Cancel
from net.channel import Channel, Identity, Listener, connect
from net.mail import TcpMail
from net.relay import plain_end
from net.tls import FileTls, SecretTls, Tls, tls_of
from tests.authority import Authority
from tests.contract.test_mail import Box
from tests.far_host import FAR
from tests.net.faulty import Fate, FaultyChannel
from tests.net.recording_relay import recording_relay
from tests.patience import PATIENCE_S, until

KEY = b"k" * 32
ME = Identity("a:1", "x", 1)
DAY_S = 24 * 3600.0


class Server:
    def __init__(self, tls: Tls | None, host: str = FAR, key: bytes = KEY) -> None:
        self.refused: list[str] = []
        self.channels: asyncio.Queue[Channel] = asyncio.Queue()
        self.listener = Listener(host, key, self._serve, self.refused.append, tls=tls)
        self.address = self.listener.address
        self.listener.start(Identity(self.address, "y", os.getpid()))

    async def _serve(self, channel: Channel) -> None:
        await self.channels.put(channel)
        await asyncio.Event().wait()


Make = Callable[..., Server]


@pytest.fixture
async def server() -> AsyncIterator[Make]:
    made: list[Server] = []

    def make(tls: Tls | None, host: str = FAR, key: bytes = KEY) -> Server:
        made.append(Server(tls, host, key))
        return made[-1]

    yield make
    for one in made:
        await one.listener.close()


async def both_refuse(server: Server, tls: Tls | None, here: str, there: str, key: bytes = KEY) -> None:
    with pytest.raises((ProtocolError, ReplicaLost), match=here):
        await connect(server.address, key, ME, tls=tls)
    await until(lambda: bool(server.refused))
    assert there in server.refused[0]
    assert server.channels.empty()


@pytest.mark.parametrize(
    ("tls", "host", "is_read"),
    [("auto", FAR, False), ("files", FAR, False), ("off", FAR, True), ("auto", "127.0.0.1", True)],
)
async def test_what_leaves_the_host_cannot_be_read_on_the_way(
    tmp_path: Path, server: Make, tls: str, host: str, is_read: bool
) -> None:
    cert, key, ca = Authority(tmp_path, "cluster").member("x") if tls == "files" else ("", "", "")
    security = SecurityConfig.model_validate({"tls": tls, "tls_cert": cert, "tls_key": key, "tls_ca": ca})
    there = server(tls_of(security, KEY), host)
    async with recording_relay(there.address, host) as (address, wire):
        ours = await connect(address, KEY, ME, tls=tls_of(security, KEY))
        theirs = await there.channels.get()
        for channel, other in ((ours, theirs), (theirs, ours)):
            sending = asyncio.create_task(channel.send(["a secret prompt"], [memoryview(b"its KV" * 50_000)]))
            header, size = await other.recv()
            await other.readinto(memoryview(bytearray(size)))
            await sending
            assert msgpack.unpackb(header) == ["a secret prompt"]
        assert [word in b"".join(wire) for word in (b"a secret", b"its KV", b"BATON1")] == [is_read] * 3
        ours.close()


async def test_another_clusters_authority_is_refused(server: Make) -> None:
    here, there = "not of this cluster's authority", "refuses this side's certificate"
    await both_refuse(server(SecretTls(KEY)), SecretTls(b"another"), here, there)


async def test_a_strangers_certificate_is_refused_although_it_trusts_the_cluster(
    tmp_path: Path, server: Make
) -> None:
    cluster, stranger = Authority(tmp_path, "cluster"), Authority(tmp_path, "stranger")
    cert, key, _ = stranger.member("s")
    there = server(FileTls(*cluster.member("holder")))
    await both_refuse(
        there,
        FileTls(cert, key, str(cluster.path)),
        "it refuses this side's certificate, which is not of its cluster",
        "not of this cluster's authority",
    )


@pytest.mark.parametrize("late", ["the side that dials", "the side that accepts"])
async def test_an_expired_certificate_is_refused(tmp_path: Path, server: Make, late: str) -> None:
    cluster = Authority(tmp_path, "cluster")
    good, old = FileTls(*cluster.member("good")), FileTls(*cluster.member("old", days=-1))
    said, heard = "its certificate has expired", "it refuses this side's certificate, which has expired"
    if late == "the side that dials":
        await both_refuse(server(good), old, heard, said)
    else:
        await both_refuse(server(old), good, said, heard)


async def test_hosts_whose_clocks_are_far_apart_are_told_so(server: Make) -> None:
    ahead = SecretTls(KEY, lambda: time.time() + 5 * DAY_S)
    await both_refuse(server(ahead), SecretTls(KEY), "compare the hosts' clocks", "certificate")


async def test_a_plain_peer_is_refused(server: Make) -> None:
    await both_refuse(server(SecretTls(KEY)), None, "takes TLS alone", "the peer at 127.0.0.1 speaks no TLS")


async def test_a_peer_that_speaks_tls_is_refused_where_it_is_off(server: Make) -> None:
    await both_refuse(server(None), SecretTls(KEY), "does not speak TLS", "the peer speaks TLS")


async def test_the_cluster_key_is_proven_inside_tls_as_well(tmp_path: Path, server: Make) -> None:
    cluster = Authority(tmp_path, "cluster")
    there, tls = server(FileTls(*cluster.member("holder"))), FileTls(*cluster.member("writer"))
    await both_refuse(there, tls, "cluster key", "cluster key", key=b"wrong" * 8)


async def test_older_tls_and_peers_without_a_certificate_are_refused(server: Make) -> None:
    there = server(SecretTls(KEY))
    host, port = there.address.split(":")

    def strangers() -> None:
        for newest in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.maximum_version = newest
            with (
                pytest.raises(ssl.SSLError),
                socket.create_connection((host, int(port)), PATIENCE_S) as sock,
                context.wrap_socket(sock) as made,
            ):
                made.recv(1)

    await asyncio.to_thread(strangers)
    await until(lambda: len(there.refused) == 2)
    assert "unsupported protocol" in there.refused[0]
    assert "it shows no certificate" in there.refused[1]


async def test_certificates_are_made_again_and_connections_go_on(server: Make) -> None:
    now = [time.time()]
    tls = SecretTls(KEY, lambda: now[0])
    there, first = server(tls), tls.context(dialled=True)
    old = await connect(there.address, KEY, ME, tls=tls)
    its_end = await there.channels.get()
    assert tls.context(dialled=True) is first
    now[0] += DAY_S
    assert tls.context(dialled=True) is not first
    new = await connect(there.address, KEY, ME, tls=SecretTls(KEY))
    await old.send("still here")
    assert msgpack.unpackb((await its_end.recv())[0]) == "still here"
    old.close()
    new.close()


async def test_a_new_authority_under_load_loses_no_message(tmp_path: Path) -> None:
    """Files are renewed while connections are cut: what is not acknowledged comes over the next one."""
    files = [tmp_path / name for name in ("cert", "key", "ca")]

    def renew(name: str) -> None:
        for file, made in zip(files, Authority(tmp_path, name).member("member"), strict=True):
            file.write_bytes(Path(made).read_bytes())

    renew("first")
    cuts: list[Fate] = []

    def fate(_: bytes) -> Fate:
        return cuts.pop() if cuts else "pass"

    def join() -> Box:
        return Box(
            TcpMail(
                KEY,
                FAR,
                wrap=lambda channel: FaultyChannel(channel, fate),  # type: ignore[arg-type,return-value]
                tls=FileTls(*map(str, files)),
            )
        )

    a, b = join(), join()
    for i in range(300):
        a.mail.send(b.mail.address, Cancel("r", i))
        if i % 100 == 50:
            renew(f"authority {i}")
        if i % 20 == 10:
            cuts.append("cut")
        await asyncio.sleep(0.001)
    await b.until(lambda box: len(box.got) == 300)
    assert [message.attempt for _, message in b.got] == list(range(300))  # type: ignore[union-attr]
    assert a.lost == b.lost == []
    await a.mail.close()
    await b.mail.close()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_large_frames_go_both_ways_at_once_on_either_event_loop(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    data = os.urandom(5_000_000)

    async def exchange() -> None:
        there = Server(SecretTls(KEY))
        ours = await connect(there.address, KEY, ME, tls=SecretTls(KEY))
        theirs = await there.channels.get()

        async def take(channel: Channel) -> bool:
            _, size = await channel.recv()
            await channel.readinto(memoryview(got := bytearray(size)))
            return got == data

        ends = (ours, theirs)
        sends = [channel.send(1, [memoryview(data)]) for channel in ends]
        done = await asyncio.gather(*sends, *map(take, ends))
        assert done[2:] == [True, True]
        ours.close()
        with pytest.raises(ReplicaLost):
            await theirs.recv()
        await there.listener.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(exchange())


async def test_an_encrypted_connection_can_be_a_socket_for_two_threads_at_once(server: Make) -> None:
    there = server(SecretTls(KEY))
    ours = await connect(there.address, KEY, ME, tls=SecretTls(KEY))
    near, far = plain_end(ours.detach()), plain_end((await there.channels.get()).detach())
    data, got = os.urandom(8_000_000), dict[str, bytes]()

    def read(name: str, sock: socket.socket) -> None:
        parts: list[bytes] = []
        while sum(map(len, parts)) < len(data):
            parts.append(sock.recv(1 << 20))
        got[name] = b"".join(parts)

    threads = [threading.Thread(target=read, args=pair) for pair in (("near", near), ("far", far))]
    threads += [threading.Thread(target=sock.sendall, args=(data,)) for sock in (near, far)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert got == {"near": data, "far": data}
    near.sendall(b"last words")
    near.close()
    assert await asyncio.to_thread(far.recv, 100) == b"last words"
    assert await asyncio.to_thread(far.recv, 100) == b"", "the other side's end is not seen"
    far.close()


def test_missing_and_unreadable_files_are_refused_by_name(tmp_path: Path) -> None:
    cert, _, ca = Authority(tmp_path, "cluster").member("x")
    with pytest.raises(ConfigError, match="tls_key: there is no file"):
        FileTls(cert, str(tmp_path / "nothing"), ca)
    (tmp_path / "rubbish").write_text("rubbish")
    with pytest.raises(ConfigError, match="rubbish"):
        FileTls(cert, str(tmp_path / "rubbish"), ca)
