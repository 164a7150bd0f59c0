"""A real HTTP ingress, draining as Baton's does on SIGTERM, over tokens that come at a pace instead of from an engine.

The pace is fixed; or, for a prompt that names a `tests.deploy.streams.Receipts`, each token waits for the receipt of the
one before it.

python -m tests.deploy.paced_ingress PORT PAUSE_S NOTICE_S"""

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator

import uvloop

from cluster.ingress.generation.request_params import ApiSettings
from cluster.ingress.http.draining import drain
from cluster.ingress.http.http_server import HttpServer
from cluster.ingress.http_app import create_app
from cluster.ingress.telemetry.observers import make_observers
from cluster.ingress.tenants.access import Access
from core.reports import DroppedBlocks, Status
from core.types import FinishReason, Request, TokenOut
from tests.cluster.ingress.api.fakes import END, NAME, ByteTokenizer, FakeAdapters, FakeModelSleep
from tests.cluster.ingress.api.harness import OPEN
from tests.deploy.streams import connected_receipts

_LONGEST_S = 30.0


class Pace:
    """Output token i is the letter i, after (i + 1) pauses, or after the receipt of token i - 1."""

    address = "pace"

    def __init__(self, pause_s: float) -> None:
        self.adapters, self.model_sleep = FakeAdapters(), FakeModelSleep()
        self._pause_s, self._count, self._retiring = pause_s, 0, False

    def new_request_id(self) -> str:
        self._count += 1
        return f"r{self._count}"

    def retire(self) -> None:
        self._retiring = True

    async def ready(self) -> tuple[bool, str]:
        return not self._retiring, "shutting down" if self._retiring else ""

    async def status(self) -> Status:
        return Status(nonce=0, why_not="", num_queued=0, instances=())

    async def drop_caches(self) -> dict[str, DroppedBlocks]:
        return {}

    def noted(self, request: Request, num_tokens: int, kept_at: str) -> None: ...

    async def find_stream(self, stream: str, owner: str) -> None:
        return None

    async def hint_session(self, tenant: str, session: str, *, release: bool) -> list[str]:
        return []

    async def generate(self, request: Request, shared: object = None) -> AsyncGenerator[TokenOut, None]:
        num_tokens = request.sampling.max_tokens
        async with connected_receipts(bytes(request.prompt).decode()) as receipts:
            for index in range(num_tokens):
                if receipts is None:
                    await asyncio.sleep(self._pause_s)
                else:
                    await receipts.readexactly(1)
                yield TokenOut(
                    request_id=request.id,
                    attempt=0,
                    index=index,
                    token=ord("a") + index % 26,
                    logprob=None,
                    top=(),
                    finish=FinishReason.LENGTH if index + 1 == num_tokens else None,
                )


async def serve(port: int, pause_s: float, notice_s: float) -> None:
    pace = Pace(pause_s)
    app = create_app(
        pace,
        ByteTokenizer(),
        ApiSettings(model_name=NAME, max_context_tokens=4096, vocab_size=257, eos_token_ids=(END,)),
        Access(OPEN),
        make_observers(NAME),
    )
    server = HttpServer(app, "127.0.0.1", [port], shared=False)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server.start()
    await stop.wait()
    await drain([pace], server, notice_s, _LONGEST_S)


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))
