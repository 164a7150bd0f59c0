"""Somebody on the way between two hosts, who keeps all that passes."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from tests.far_host import FAR


@asynccontextmanager
async def recording_relay(endpoint: str, host: str = FAR) -> AsyncGenerator[tuple[str, list[bytes]]]:
    """Yield an address that leads to `endpoint`, and what passes. `host`: where the dialling side sees it."""
    wire: list[bytes] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            wire.append(data)
            writer.write(data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_host, far_port = endpoint.split(":")
        far_reader, far_writer = await asyncio.open_connection(far_host, int(far_port))
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer), return_exceptions=True)

    server = await asyncio.start_server(relay, host, 0)
    yield f"{host}:{server.sockets[0].getsockname()[1]}", wire
    server.close()
