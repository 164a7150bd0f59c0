"""Goes on with background responses whose ingress is gone. Any ingress that shares the store does, and the first one has it."""

import asyncio
import logging
import uuid

from fastapi import Request as HttpRequest
from starlette.types import Message

from cluster.ingress.generation.answering import Answering
from cluster.ingress.responses.response_making import ResponseMaking
from cluster.ingress.responses.response_store import ResponseStore, StoredResponse
from cluster.ingress.responses.response_turn import turn_of
from cluster.ingress.telemetry import request_context
from cluster.ingress.tenants.access import Access, KeyHolder
from core.clock import current_time
from core.errors import BatonError, ReplicaLost, StoreUnavailable

log = logging.getLogger(__name__)

LOOK_S = 2.0
PATH = "/v1/responses"


class BackgroundResponses:
    def __init__(
        self, answering: Answering, responses: ResponseStore, making: ResponseMaking, access: Access
    ) -> None:
        self._answering, self._responses = answering, responses
        self._making, self._access = making, access

    async def run(self) -> None:
        """Look for them until cancelled. Returns at once where answers end with their connections."""
        while self._responses.resumes:
            await asyncio.sleep(LOOK_S)
            try:
                for stored in await self._responses.claim_left(self._answering.settings.serves):
                    await self._go_on(stored)
            except (OSError, StoreUnavailable) as error:
                log.warning("cannot look for background responses: %s", error)

    async def _go_on(self, stored: StoredResponse) -> None:
        response_id = stored.body["id"]
        holder = self._access.holder_named(stored.tenant)
        if holder is None or stored.request is None:
            await self._responses.leave(response_id)
            return
        log.warning("response %s goes on here: its ingress is gone", response_id)
        turn = turn_of(stored.request)
        http = _unattended(holder, turn.slo_class, len(str(stored.request)))
        try:
            http.state.identity = await self._answering.resuming.begun(
                http,
                response_id.removeprefix("resp_"),
                stored.body["created_at"],
                record=turn.encoded(),
            )
            ready = await self._making.prepare(http, turn)
        except ReplicaLost:
            await self._responses.leave(response_id)  # nobody knows the instances at the moment
        except BatonError as error:
            await self._responses.fail(stored, str(error))
        else:
            self._making.run(http, ready)


def _unattended(holder: KeyHolder, slo_class: str | None, num_bytes: int) -> HttpRequest:
    """Return the request of a client that is not connected."""

    async def receive() -> Message:
        await asyncio.Event().wait()  # it never goes away
        raise AssertionError

    headers = [] if slo_class is None else [(b"x-slo-class", slo_class.encode("latin-1"))]
    http = HttpRequest({"type": "http", "method": "POST", "path": PATH, "headers": headers}, receive)
    state = http.state
    state.request_id, state.arrival_at = uuid.uuid4().hex, current_time()
    state.holder, state.tenant, state.notes, state.effort = holder, holder.tenant, [], ""
    state.digest, state.num_bytes, state.identity = b"", num_bytes, None
    request_context.request_id.set(state.request_id)
    request_context.route.set(PATH)
    return http
