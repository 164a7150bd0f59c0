"""Clients that go away, over real sockets."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from cluster.ingress.generation.request_params import ApiSettings
from cluster.ingress.http.http_server import HttpServer
from tests.cluster.ingress.api.fakes import ByteTokenizer, FakeGenerator
from tests.cluster.ingress.api.harness import COMPLETIONS, OK, SETTINGS, Api
from tests.patience import PATIENCE_S, until


@contextlib.asynccontextmanager
async def serving(
    generator: FakeGenerator, settings: ApiSettings = SETTINGS, tokenizer: ByteTokenizer | None = None
) -> AsyncIterator[tuple[Api, int]]:
    api = Api(generator, settings, tokenizer=tokenizer)
    server = HttpServer(api.app, "127.0.0.1", [0], shared=False)
    server.start()
    try:
        yield api, server.port
    finally:
        await server.stop()


def http_post(path: str, body: bytes, length: int | None = None) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length or len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stall_at", [None, 0, 3])
async def test_a_client_that_goes_away_ends_the_generation(
    stream: bool, n: int, stall_at: int | None
) -> None:
    generator = FakeGenerator("x" * 150, pause_s=0.02)
    generator.stall_at = stall_at
    async with serving(generator) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            http_post(COMPLETIONS, json.dumps({**OK, "n": n, "max_tokens": 180, "stream": stream}).encode())
        )
        await until(lambda: len(generator.requests) == n)
        if stream and stall_at != 0:
            await reader.readuntil(b"data: ")
        writer.close()
        await writer.wait_closed()
        await until(lambda: len(generator.closed) == n)
    assert not generator.finished


async def test_a_client_that_goes_away_while_it_asks_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(FakeGenerator()) as (api, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(http_post(COMPLETIONS, b'{"model"', length=100))
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        counted = f'baton_http_requests_total{{route="{COMPLETIONS}",status="499"}} 1.0'
        async with asyncio.timeout(PATIENCE_S):
            while counted not in (await api.http.get("/metrics")).text:
                await asyncio.sleep(0.01)
    assert not caplog.records


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    settings = replace(SETTINGS, body_timeout_s=0.2)
    async with serving(FakeGenerator(), settings) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(http_post(COMPLETIONS, b'{"model"', length=100))
        assert b" 408 " in await asyncio.wait_for(reader.readline(), PATIENCE_S)
        writer.close()
        await writer.wait_closed()


async def test_a_body_that_is_announced_too_long_is_not_read() -> None:
    async with serving(FakeGenerator()) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(http_post(COMPLETIONS, b"{", length=1 << 40))
        assert b" 413 " in await asyncio.wait_for(reader.readline(), PATIENCE_S)
        writer.close()
        await writer.wait_closed()
