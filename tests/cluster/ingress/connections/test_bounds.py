"""What one client without a key may cost an ingress, state by state, over real sockets: bytes, seconds and connections."""

import asyncio
import ssl
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from cluster.ingress.http.connection_limits import (
    MAX_HEADERS,
    MAX_OUTSIDE_BYTES,
    ConnectionLimits,
    connection_limits,
)
from cluster.ingress.http.http_server import HttpServer
from cluster.ingress.http.ingress_tls import ingress_tls
from cluster.ingress.tenants.access import Rules, TenantRules
from core.config.serve_config import ServeConfig
from tests.authority import Authority
from tests.cluster.ingress.api.fakes import FakeGenerator
from tests.cluster.ingress.api.harness import CLASSES, COMPLETIONS, SETTINGS, Api
from tests.cluster.ingress.connections.raw_clients import CHUNKED, GET, Client, serving
from tests.patience import PATIENCE_S, until

LOCKED = Rules(CLASSES, {"": TenantRules((SecretStr("secret"),))})
MIB = 1 << 20
SLACK = 2 * MIB
"""What the kernel takes of a sender before anybody reads, in both directions."""


def locked() -> Any:
    return Api(FakeGenerator(), SETTINGS, LOCKED).app


@pytest.mark.parametrize("begun", [b"", b"GET /health HTTP/1.1\r\nHost:", GET + b"GET /hea"])
async def test_a_head_that_does_not_come_ends_the_connection(begun: bytes) -> None:
    async with serving(head_s=0.2) as port:
        client = await Client.connect(port)
        await client.send(begun)
        answered = await client.ended()
        assert answered.startswith(b"HTTP/1.1 200" if begun.startswith(GET) else b"")
        assert bool(answered) == begun.startswith(GET)
        client.close()


async def test_a_kept_connection_may_idle() -> None:
    async with serving(head_s=0.2) as port:
        client = await Client.connect(port)
        for _ in range(2):
            await client.send(GET)
            await client.read(b"alive")
            await asyncio.sleep(0.4)
        await client.send(GET)
        await client.read(b"alive")
        client.close()


async def test_empty_lines_do_not_keep_a_connection() -> None:
    async with serving(idle_s=1) as port:
        client = await Client.connect(port)
        await client.send(GET)
        await client.read(b"alive")
        assert await client.send_until_cut(b"\r\n", 1 << 30) < 1 << 30
        client.close()


@pytest.mark.parametrize(
    "begun",
    [
        b"GET /health HTTP/1.1\r\nX: ",
        CHUNKED % b"/v1/completions" + b"0\r\nX: ",
        CHUNKED % b"/v1/completions" + b"2;x=",
        CHUNKED % b"/health" + b"0\r\nX: ",
    ],
    ids=["head", "trailer", "chunk extension", "trailer of what no route takes"],
)
async def test_a_line_without_end_is_not_collected(begun: bytes) -> None:
    async with serving(locked()) as port:
        client = await Client.connect(port)
        await client.send(begun)
        taken = await client.send_until_cut(b"x" * 16384, 64 * MIB)
        assert taken < MAX_OUTSIDE_BYTES + SLACK
        client.close()


@pytest.mark.parametrize("route", [b"/v1/completions", b"/v1/nothing", b"/reset_prefix_cache"])
async def test_trailers_without_end_are_not_collected(route: bytes) -> None:
    """An ingress once kept 1 GiB of 62 MB of them."""
    async with serving(locked()) as port:
        client = await Client.connect(port)
        await client.send(CHUNKED % route + b"0\r\n")
        tracemalloc.start()
        taken = await client.send_until_cut(b"a:b\r\n" * 4096, 64 * MIB)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert taken < MAX_OUTSIDE_BYTES + SLACK
        assert peak < 4 * MIB
        client.close()


async def test_a_body_is_more_than_what_stands_between_its_bytes() -> None:
    extended = b"1;x=%s\r\nx\r\n" % (b"x" * 8000)
    async with serving(Api(FakeGenerator()).app) as port:
        client = await Client.connect(port)
        await client.send(CHUNKED % COMPLETIONS.encode())
        assert await client.send_until_cut(extended, 64 * MIB) < 2 * MAX_OUTSIDE_BYTES + SLACK
        client.close()
        other = await Client.connect(port)
        body = b'{"model": "fake", "prompt": "%s"}' % (b"x" * 100)
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
        await other.send(CHUNKED % COMPLETIONS.encode() + chunks + b"0\r\n\r\n")
        assert (await other.read(b"\r\n")).startswith(b"HTTP/1.1 200 ")
        other.close()


async def test_trailers_that_come_slowly_end_the_connection() -> None:
    async with serving(locked(), rest_s=0.3) as port:
        client = await Client.connect(port)
        await client.send(CHUNKED % b"/v1/completions" + b"0\r\n")
        await client.read(b"invalid_api_key")
        started = asyncio.get_running_loop().time()
        assert await client.send_until_cut(b"a:b\r\n", 1 << 30) < 1 << 30
        assert asyncio.get_running_loop().time() - started < 10
        client.close()


async def test_the_rest_of_a_refused_body_is_dropped_for_a_while_and_then_cut_off() -> None:
    async with serving(locked(), rest_s=0.5) as port:
        client = await Client.connect(port)
        await client.send(CHUNKED % b"/v1/completions")
        assert b"401 Unauthorized" in await client.read(b"invalid_api_key")
        chunk = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
        await client.send(chunk)  # a client that writes all before it reads is not cut off at once
        tracemalloc.start()
        assert await client.send_until_cut(chunk, 1 << 34) < 1 << 34
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 * MIB
        client.close()


async def test_a_trailer_is_no_header() -> None:
    async with serving(locked()) as port:
        client = await Client.connect(port)
        await client.send(
            CHUNKED % b"/v1/completions" + b"2\r\n{}\r\n0\r\nAuthorization: Bearer secret\r\n\r\n"
        )
        assert b"401" in await client.read(b"invalid_api_key")
        client.close()


async def test_a_request_has_so_many_header_lines() -> None:
    async with serving() as port:
        for num, status in ((MAX_HEADERS - 1, b"200"), (MAX_HEADERS, b"400")):
            client = await Client.connect(port)
            await client.send(b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * num + b"\r\n")
            assert (await client.read(b"\r\n")).split()[1] == status
            client.close()


async def test_requests_that_are_sent_ahead_are_answered_one_after_the_other() -> None:
    async with serving() as port:
        client = await Client.connect(port)
        await client.send(GET * 300)
        answered = b""
        while answered.count(b"alive") < 300:
            answered += await client.read(b"alive")
        await client.send(GET)
        await client.read(b"alive")
        client.close()


async def test_requests_that_are_sent_ahead_are_not_collected() -> None:
    """One write of 18 bytes a request would be 14,000 requests, of which each once brought in another such write."""
    generator = FakeGenerator()
    generator.stall_at = 0
    async with serving(Api(generator).app) as port:
        client = await Client.connect(port)
        body = b'{"model": "fake", "prompt": "x", "stream": true}'
        head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        await client.send(head % (COMPLETIONS.encode(), len(body)) + body)
        tracemalloc.start()
        taken = await client.send_until_cut(b"GET / HTTP/1.1\r\n\r\n" * 900, 64 * MIB, patience_s=2.0)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert taken < MAX_OUTSIDE_BYTES + SLACK
        assert len(generator.requests) == 1
        assert peak < 4 * MIB
        generator.go_on.set()
        client.close()


async def test_a_client_that_reads_nothing_is_cut_off() -> None:
    """Its answers stand in the kernel's and in this process's memory, and it keeps a socket."""
    async with serving(send_s=0.5) as port:
        client = await Client.connect(port, read_bytes=4096)
        begun = asyncio.get_running_loop().time()
        assert await client.send_until_cut(GET * 100, 64 * MIB) < 8 * MIB
        assert asyncio.get_running_loop().time() - begun < PATIENCE_S / 2
        held = len(await client.ended())
        assert held < MIB
        client.close()


async def test_a_stream_ends_whose_client_reads_nothing() -> None:
    is_over = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        gone = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 1024, "more_body": True})
            await asyncio.sleep(0)
        is_over.set()

    async with serving(app, send_s=0.5) as port:
        client = await Client.connect(port, read_bytes=4096)
        await client.send(GET)
        async with asyncio.timeout(PATIENCE_S):
            await is_over.wait()
        assert len(await client.ended()) < MIB
        client.close()


async def test_an_answer_that_only_the_kernel_keeps_has_no_more_time() -> None:
    """It fits into the socket's own buffer, so that nothing waits in this process."""
    asked: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"300000")]}
        )
        await send({"type": "http.response.body", "body": b"x" * 300_000})

    limits = ConnectionLimits(send_s=0.5)
    server = HttpServer(app, "127.0.0.1", [0], shared=False, limits=limits)
    server.start()
    client = await Client.connect(server.port, read_bytes=4096)
    await client.send(GET)
    await until(lambda: bool(asked))
    await until(lambda: server.num_connections == 0)
    client.close()
    await server.stop()


async def test_a_client_that_reads_slowly_gets_all_of_a_long_answer() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        length = (b"content-length", b"%d" % (6 * MIB))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": b"x" * (6 * MIB)})

    async with serving(app, send_s=3.0) as port:
        client = await Client.connect(port, read_bytes=65536)
        await client.send(GET)
        got = 0
        while got < 6 * MIB:
            taken = await client.take(1 << 16)
            assert taken, f"cut off after {got} bytes"
            got += taken
            await asyncio.sleep(0.02)
        client.close()


async def test_one_address_cannot_take_all_connections() -> None:
    """The oldest of those that do nothing make room, and go on as little as those that never began."""
    async with serving(most=20, head_s=600.0) as port:
        flood = [await Client.connect(port, "127.0.0.2") for _ in range(60)]
        for client in flood[:40]:
            assert await client.ended() == b""
        other = await Client.connect(port, "127.0.0.3")
        await other.send(GET)
        await other.read(b"alive")
        more = [await Client.connect(port, "127.0.0.2") for _ in range(60)]
        await other.send(GET)
        await other.read(b"alive")
        for client in (other, *flood, *more):
            client.close()


async def test_an_upgrade_that_is_asked_for_is_no_more_than_a_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(locked(), head_s=0.5) as port:
        for wanted in (b"websocket", b"h2c"):
            client = await Client.connect(port)
            await client.send(
                b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n" % wanted
            )
            assert b"401 Unauthorized" in await client.read(b"invalid_api_key")
            assert await client.send_until_cut(b"\x81\x05hello" * 1000, 64 * MIB) < MAX_OUTSIDE_BYTES + SLACK
            client.close()
    assert "upgrade" not in caplog.text.lower()


async def test_a_running_answer_keeps_its_connection() -> None:
    generator = FakeGenerator()
    generator.stall_at = 0
    async with serving(Api(generator).app, most=3) as port:
        body = b'{"model": "fake", "prompt": "x"}'
        head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        running = [await Client.connect(port) for _ in range(3)]
        for client in running:
            await client.send(head % (COMPLETIONS.encode(), len(body)) + body)
        async with asyncio.timeout(30):
            while len(generator.requests) < 3:
                await asyncio.sleep(0.01)
        refused = await Client.connect(port, "127.0.0.9")
        assert (await refused.ended()).startswith(b"HTTP/1.1 503 ")
        generator.go_on.set()
        for client in running:
            await client.read(b"text_completion")
        for client in (refused, *running):
            client.close()


async def test_clients_that_never_begin_tls_are_cut_off_and_make_room(tmp_path: Path) -> None:
    cert, key, _ = Authority(tmp_path, "ours").member("ingress")
    tls = ingress_tls(ServeConfig(tls_cert=cert, tls_key=key))
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    async with serving(tls=tls, most=5, head_s=1.0) as port:
        silent = [await Client.connect(port, "127.0.0.2") for _ in range(10)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
        writer.write(GET)
        async with asyncio.timeout(PATIENCE_S):
            await reader.readuntil(b"alive")
        for client in silent:
            assert await client.ended() == b""
            client.close()
        writer.close()


async def test_an_address_may_have_a_limit_of_its_own() -> None:
    async with serving(most_per_address=2) as port:
        first, second, third = [await Client.connect(port, "127.0.0.2") for _ in range(3)]
        assert await first.ended() == b""
        for client in (second, third, await Client.connect(port, "127.0.0.3")):
            await client.send(GET)
            await client.read(b"alive")
            client.close()
        first.close()


def test_an_ingress_has_no_more_connections_than_files() -> None:
    assert connection_limits(ServeConfig(max_connections=10, request_timeout_s=3)).most == 10
    assert connection_limits(ServeConfig(max_connections=10, request_timeout_s=3)).send_s == 3
    assert connection_limits(ServeConfig(max_connections=1 << 40)).most < 1 << 40
