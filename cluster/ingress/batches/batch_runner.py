"""Runs batches beside clients' requests: in every ingress, each batch in one of them.

Requests go through the API itself, on their tenant's account, so that every check, limit and meter holds."""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message

from cluster.ingress.batches.batch_job import BatchJob, Json
from cluster.ingress.batches.batch_store import FINAL, BatchStore
from cluster.ingress.batches.file_store import FileStore
from cluster.ingress.tenants.access import Access, KeyHolder, Tenant
from core.errors import RequestError

log = logging.getLogger(__name__)

HOLDER = "baton.holder"
"""The key in the scope of a request that did not come over the network, under which stands who asks. No client can put it
there."""
LOOK_S = 1.0
_MAX_BATCHES = 32
"""The most batches of one tenant in one ingress at a time. Each keeps where its lines are in memory."""


class BatchRunner:
    def __init__(
        self,
        app: ASGIApp,
        files: FileStore,
        batches: BatchStore,
        access: Access,
        *,
        at_once: int,
        slo_class: str,
    ) -> None:
        """`at_once` is the number of requests of one tenant's batches that run at once. They have the class `slo_class`, where
        the tenant may use it and the request names none."""
        self._app, self._files, self._batches, self._access = app, files, batches, access
        self._at_once, self._slo_class = at_once, slo_class
        self._running: dict[str, asyncio.Task[None]] = {}
        self._slots: dict[str, asyncio.Semaphore] = {}
        """By tenant, its requests that may run. Its batches take turns."""

    async def run(self) -> None:
        """Run until cancelled. Unfinished batches are left to other ingresses, or to the next start."""
        try:
            while True:
                try:
                    await self._look()
                except OSError as error:
                    log.warning("cannot look for batches: %s", error)
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _look(self) -> None:
        self._running = {batch_id: task for batch_id, task in self._running.items() if not task.done()}
        unfinished = await asyncio.to_thread(self._batches.unfinished)
        num_running = Counter(record["tenant"] for record in unfinished if record["id"] in self._running)
        begun = {tenant for tenant, count in num_running.items() if count >= _MAX_BATCHES}
        for record in unfinished:
            batch_id, tenant = record["id"], record["tenant"]
            if batch_id in self._running or tenant in begun:
                continue
            if (claim := self._batches.claim(batch_id)) is not None:
                begun.add(tenant)  # one at each look, so that other ingresses have their part
                self._running[batch_id] = task = asyncio.create_task(self._run(batch_id))
                task.add_done_callback(lambda _, claim=claim: claim.close())

    async def _run(self, batch_id: str) -> None:
        record = self._batches.load(batch_id)
        if record is None or record["status"] in FINAL:
            return  # it ended between the look at it and the claim
        holder = self._access.holder_named(record["tenant"])
        if holder is None:
            log.warning("batch %s waits for its tenant %r, which is not known", batch_id, record["tenant"])
            return

        async def call(body: Json) -> tuple[int, Mapping[str, str], Any]:
            return await self._call(record["endpoint"], body, holder)

        slots = self._slots.setdefault(holder.tenant.name, asyncio.Semaphore(self._at_once))
        try:
            await BatchJob(record, call, self._files, self._batches, self._at_once, slots).run()
        except Exception:
            log.exception("batch %s is taken up again", batch_id)

    async def _call(self, path: str, body: Json, holder: KeyHolder) -> tuple[int, Mapping[str, str], Any]:
        data = json.dumps(body).encode()
        headers = {"content-type": "application/json", "content-length": str(len(data))}
        if body.get("service_tier") is None and self._may_use_class(holder.tenant):
            headers["x-slo-class"] = self._slo_class
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
            "client": None,
            "server": None,
            HOLDER: holder,
        }
        sent: list[Message] = []
        bodies = iter([{"type": "http.request", "body": data, "more_body": False}])

        async def receive() -> Message:
            if (message := next(bodies, None)) is not None:
                return message
            await asyncio.Event().wait()  # this client never goes away
            raise AssertionError

        async def send(message: Message) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        start, *parts = sent
        found = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in start["headers"]}
        return start["status"], found, json.loads(b"".join(part.get("body", b"") for part in parts))

    def _may_use_class(self, tenant: Tenant) -> bool:
        try:
            self._access.slo(tenant, self._slo_class, None)
        except RequestError:
            return False
        return True
