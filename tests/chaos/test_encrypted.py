"""Two hosts, and somebody on the wire between them who keeps all that passes."""

import asyncio
import hashlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgpack
import pytest

from tests.chaos.witness import LAYOUT
from tests.chaos.world import World
from tests.deploy.network import NetworkEnd, missing_network, network
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ALL_FRAMES = 3
NUM_TOKENS = 41
DECODE = ("decode0", "decode1")
OTHERS = ("scheduler", "prefill0", "prefill1", "frontend0", "frontend1")


@pytest.fixture
def ends() -> Iterator[list[NetworkEnd]]:
    if reason := missing_network():
        pytest.skip(reason)
    with network(2) as found:
        yield found


@contextmanager
def capture(interface: str) -> Iterator[list[bytes]]:
    """Yield the frames that pass, to which new ones are added."""
    frames: list[bytes] = []
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_FRAMES)) as tap:
        tap.bind((interface, 0))
        tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        tap.settimeout(0.2)
        ended = threading.Event()

        def keep() -> None:
            while not ended.is_set():
                with suppress(TimeoutError):
                    frames.append(tap.recv(1 << 17))

        thread = threading.Thread(target=keep)
        thread.start()
        try:
            yield frames
        finally:
            ended.set()
            thread.join()


def words_of(prompt: tuple[int, ...]) -> dict[str, bytes]:
    """What a listener looks for: a prompt's tokens as mail has them, and the KV of its first token in the first layer."""
    parent = hashlib.blake2b(b"witness" + prompt[0].to_bytes(4, "little"), digest_size=16).digest()
    tokens = b"".join(msgpack.packb(token) for token in prompt[:8])  # type: ignore[misc]
    return {"prompt": tokens, "KV": hashlib.shake_128(parent).digest(4 * LAYOUT.head_dim)}


@pytest.mark.parametrize("tls", ["auto", "off"])
async def test_a_capture_between_hosts_holds_no_prompt_and_no_kv(
    tmp_path: Path, ends: list[NetworkEnd], tls: str
) -> None:
    places = dict.fromkeys(OTHERS, ends[0]) | dict.fromkeys(DECODE, ends[1])
    wanted = {"transfer.transport": "tcp", "security.tls": tls}
    with capture(f"{ends[1].name}o") as frames:
        async with World(tmp_path, wanted, places=places) as world:
            prompts = [world.fresh_prompt(NUM_TOKENS) for _ in range(4)]
            streams = [world.streams[world.generate("frontend0", prompt, 12)] for prompt in prompts]
            async with asyncio.timeout(PATIENCE_S):
                for stream in streams:
                    await stream.done.wait()
            assert [tuple(stream.tokens) for stream in streams] == [stream.expected for stream in streams]
            assert all(prefill and decode for one in streams for prefill, decode in one.routes)
    seen = b"".join(frames)
    assert len(seen) > 4 * NUM_TOKENS * LAYOUT.token_bytes
    for prompt in prompts:
        found = {what: word in seen for what, word in words_of(prompt).items()}
        assert found == dict.fromkeys(found, tls == "off")
