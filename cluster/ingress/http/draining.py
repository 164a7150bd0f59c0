"""How an ingress leaves so that nothing is lost: first it says so, then it accepts no more, then it finishes."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from cluster.ingress.http.http_server import HttpServer

log = logging.getLogger(__name__)


class Retiring(Protocol):
    def retire(self) -> None: ...


async def drain(frontends: Sequence[Retiring], server: HttpServer, notice_s: float, timeout_s: float) -> None:
    """Leave. For `notice_s` /ready is 503 while requests are still answered, so that load balancers can turn away. Then running
    answers may go on for `timeout_s`."""
    for frontend in frontends:
        frontend.retire()
    server.retire()
    log.info("draining: %d connections, %g s of notice", server.num_connections, notice_s)
    await asyncio.sleep(notice_s)
    await server.stop(timeout_s)
