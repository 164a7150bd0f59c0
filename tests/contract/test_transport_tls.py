"""KV over TLS: both sides show a certificate of the cluster's authority, or nothing is moved."""

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from core.errors import ConfigError, ReplicaLost
from core.kv import KVLayout, KVShard
from kvtransfer.copies import CopyRun
from kvtransfer.transport import tcp
from kvtransfer.transport.streams import Stream, TlsContexts
from kvtransfer.transport.tcp import TcpReceiver, TcpSender
from kvtransfer.transport.write_admission import WriteAdmission
from net.channel import Identity
from tests.patience import PATIENCE_S

KEY = b"cluster key"
SHARD = KVShard.whole(KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32"))
SIZE = 3 << 20


class Authority:
    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._cert = self._sign(name, self._key.public_key(), authority=True)
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(self._cert.public_bytes(serialization.Encoding.PEM))

    def member(self, name: str) -> tuple[str, str, str]:
        """Certificate, key and authority files."""
        key = ec.generate_private_key(ec.SECP256R1())
        cert = self._sign(name, key.public_key(), authority=False)
        cert_path, key_path = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        cert_path.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
        plain = serialization.NoEncryption()
        pkcs8 = serialization.PrivateFormat.PKCS8
        key_path.write_bytes(key.private_bytes(serialization.Encoding.PEM, pkcs8, plain))
        return str(cert_path), str(key_path), str(self.path)

    def _sign(self, name: str, public: ec.EllipticCurvePublicKey, *, authority: bool) -> x509.Certificate:
        now = datetime.now(UTC)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self._name)])
        builder = x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
        constraints = x509.BasicConstraints(ca=authority, path_length=None)
        names = x509.SubjectAlternativeName([x509.DNSName(name)])
        builder = builder.add_extension(names, critical=False).add_extension(constraints, critical=True)
        return builder.sign(self._key, hashes.SHA256())


class Side:
    def __init__(self, tls: TlsContexts | None) -> None:
        self.pool = memoryview(bytearray(SIZE))
        self.num_bytes = 0
        admission = WriteAdmission(lambda *_: True, self.arrived, lambda _: None)
        me = Identity("holder", "h", os.getpid())
        self.receiver = TcpReceiver(KEY, me, "127.0.0.1", self.pool, admission, tls)
        self.region = self.receiver.region(SHARD, SIZE // SHARD.block_bytes)

    def arrived(self, _: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes


def sender(source: memoryview, tls: TlsContexts | None, checksum: bool = False) -> TcpSender:
    return TcpSender(KEY, Identity("writer", "w", os.getpid()), source, tls, checksum=checksum, num_streams=2)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "cluster")


@pytest.fixture
async def holder(authority: Authority) -> AsyncIterator[Side]:
    side = Side(TlsContexts(*authority.member("holder")))
    yield side
    await side.receiver.close()


@pytest.mark.parametrize("checksum", [False, True])
async def test_kv_arrives_and_cannot_be_read_on_the_way(
    authority: Authority, holder: Side, checksum: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = memoryview(bytearray(b"secret prompt   " * (SIZE // 16)))
    wire: list[bytes] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = holder.region.endpoint.split(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))

        async def pump(a: asyncio.StreamReader, b: asyncio.StreamWriter) -> None:
            while data := await a.read(1 << 16):
                wire.append(data)
                b.write(data)
            b.close()

        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    region = replace(holder.region, endpoint=f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    out = sender(source, TlsContexts(*authority.member("writer")), checksum)
    assert out.reaches(region)
    await out.write("g", region, [CopyRun(0, 0, SIZE)])
    async with asyncio.timeout(PATIENCE_S):
        while holder.num_bytes < SIZE:
            await asyncio.sleep(0.005)
    assert holder.pool == source
    assert sum(map(len, wire)) > SIZE
    assert not any(b"secret" in data for data in wire)
    await out.close()
    server.close()
    await server.wait_closed()


async def test_a_writer_of_another_authority_is_refused(tmp_path: Path, holder: Side) -> None:
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other", "stranger").member("writer")
    out = sender(memoryview(bytearray(SIZE)), TlsContexts(stranger[0], stranger[1], stranger[2]))
    with pytest.raises(ReplicaLost, match="TLS"):
        await out.write("g", holder.region, [CopyRun(0, 0, SIZE)])
    assert not holder.num_bytes
    await out.close()


async def test_a_holder_of_another_authority_is_refused(tmp_path: Path, authority: Authority) -> None:
    (tmp_path / "other").mkdir()
    impostor = Side(TlsContexts(*Authority(tmp_path / "other", "stranger").member("holder")))
    out = sender(memoryview(bytearray(SIZE)), TlsContexts(*authority.member("writer")))
    with pytest.raises(ReplicaLost, match="TLS"):
        await out.write("g", impostor.region, [CopyRun(0, 0, SIZE)])
    await out.close()
    await impostor.receiver.close()


async def test_plain_and_encrypted_instances_do_not_meet(authority: Authority, holder: Side) -> None:
    plain = Side(None)
    without = sender(memoryview(bytearray(SIZE)), None)
    with_tls = sender(memoryview(bytearray(SIZE)), TlsContexts(*authority.member("writer")))
    assert not without.reaches(holder.region)
    assert not with_tls.reaches(plain.region)
    await without.close()
    await with_tls.close()
    await plain.receiver.close()


async def test_the_fence_cuts_an_encrypted_stream(authority: Authority, holder: Side) -> None:
    out = sender(memoryview(bytearray(SIZE)), TlsContexts(*authority.member("writer")))
    await out.write("g", holder.region, [CopyRun(0, 0, SIZE)])
    async with asyncio.timeout(PATIENCE_S):
        await holder.receiver.fence("writer", "g")

    async def write_often() -> None:
        for _ in range(50):
            await out.write("g", holder.region, [CopyRun(0, 0, SIZE)])

    with pytest.raises(ReplicaLost):
        await write_often()
    await out.close()


async def test_a_peer_that_never_says_hello_does_not_keep_the_holder_from_closing(holder: Side) -> None:
    host, port = holder.region.endpoint.split(":")
    silent = socket.create_connection((host, int(port)))
    async with asyncio.timeout(PATIENCE_S):
        await holder.receiver.close()
    silent.close()


def test_missing_and_unreadable_files_are_refused_by_name(tmp_path: Path, authority: Authority) -> None:
    cert, _, ca = authority.member("x")
    with pytest.raises(ConfigError, match="tls_key: there is no file"):
        TlsContexts(cert, str(tmp_path / "nothing"), ca)
    (tmp_path / "rubbish").write_text("rubbish")
    with pytest.raises(ConfigError, match="rubbish"):
        TlsContexts(cert, str(tmp_path / "rubbish"), ca)


async def test_new_connections_take_certificates_that_were_renewed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authorities = [Authority(tmp_path, name) for name in ("old", "new")]
    files = [tmp_path / name for name in ("cert", "key", "ca")]

    def renew(authority: Authority) -> None:
        for file, made in zip(files, authority.member("holder"), strict=True):
            file.write_bytes(Path(made).read_bytes())

    renew(authorities[0])
    holder = Side(TlsContexts(*map(str, files)))

    async def write(authority: Authority) -> None:
        out = sender(memoryview(bytearray(SIZE)), TlsContexts(*authority.member("writer")))
        try:
            await out.write("g", holder.region, [CopyRun(0, 0, SIZE)])
        finally:
            await out.close()

    await write(authorities[0])
    with pytest.raises(ReplicaLost):
        await write(authorities[1])
    renew(authorities[1])
    await write(authorities[1])
    files[1].write_text("half a key")
    await write(authorities[1])
    assert "the changed certificate is refused, the old one holds" in caplog.text
    await holder.receiver.close()


async def test_a_sender_that_closes_while_it_shakes_hands_leaves_no_stream(
    authority: Authority, holder: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end, made = threading.Event(), threading.Event(), list[Stream]()

    def slow(sock: socket.socket, peer: str, tls: TlsContexts | None, *, dialled: bool) -> Stream:
        if not dialled:
            return Stream(sock, peer, tls, dialled=False)
        begun.set()
        assert may_end.wait(PATIENCE_S)
        made.append(Stream(sock, peer, tls, dialled=True))
        return made[-1]

    monkeypatch.setattr(tcp, "Stream", slow)
    out = sender(memoryview(bytearray(SIZE)), TlsContexts(*authority.member("writer")))
    writing = asyncio.create_task(out.write("g", holder.region, [CopyRun(0, 0, SIZE)]))
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    closing = asyncio.create_task(out.close())
    await asyncio.sleep(0)
    may_end.set()
    await closing
    assert [stream.progress() for stream in made] == [None], "the connection is still open"
    with pytest.raises(asyncio.CancelledError):
        await writing
