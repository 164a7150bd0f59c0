"""Runs batches beside clients' requests: in every ingress, each batch in one of them.

Requests go through the API itself, on their tenant's account, so that every check, limit and meter holds."""

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message

from cluster.ingress.batches.batch_job import BatchJob, Json
from cluster.ingress.batches.batch_store import FINAL, BatchStore, Record, batch_in
from cluster.ingress.batches.file_store import FileStore
from cluster.ingress.tenants.access import Access, KeyHolder, Tenant
from cluster.store.lease_keeper import LeaseKeeper
from cluster.store.store_port import LeaseLost, Store
from core.errors import RequestError, StoreUnavailable

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
        store: Store,
        access: Access,
        model: str,
        *,
        at_once: int,
        slo_class: str,
        more_models: Collection[str] = (),
    ) -> None:
        """Run the batches of `model` and `more_models`: ingresses of other models may share the store. `at_once` is the number of
        requests of one tenant's batches that run at once. They have the class `slo_class`, where the tenant may use it and the
        request names none."""
        self._app, self._access, self._models = app, access, {model, *more_models}
        self._stores = store, FileStore(store, 0), BatchStore(store)
        self._leases = LeaseKeeper(store)
        self._at_once, self._slo_class = at_once, slo_class
        self._running: dict[str, asyncio.Task[None]] = {}
        self._slots: dict[str, asyncio.Semaphore] = {}
        """By tenant, its requests that may run. Its batches take turns."""

    @property
    def holder(self) -> str:
        """How the store names who runs the batches here."""
        return self._leases.holder

    async def run(self) -> None:
        """Run until cancelled. Unfinished batches are left to other ingresses, or to the next start."""
        try:
            while True:
                try:
                    await self._look()
                except (OSError, StoreUnavailable) as error:
                    log.warning("cannot look for batches: %s", error)
                await asyncio.sleep(LOOK_S)
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _look(self) -> None:
        self._running = {batch_id: task for batch_id, task in self._running.items() if not task.done()}
        unfinished = [record for record in await self._stores[2].unfinished() if self._is_mine(record)]
        num_running = Counter(record["tenant"] for record in unfinished if record["id"] in self._running)
        begun = {tenant for tenant, count in num_running.items() if count >= _MAX_BATCHES}
        for record in unfinished:
            batch_id, tenant = record["id"], record["tenant"]
            if batch_id in self._running or tenant in begun:
                continue
            if (claimed := await self._leases.claim(batch_id)) is not None:
                begun.add(tenant)  # one at each look, so that other ingresses have their part
                self._running[batch_id] = task = asyncio.create_task(self._run(batch_in(claimed)))
                self._leases.keep(batch_id, task)

    def _is_mine(self, record: Record) -> bool:
        """Whether a batch is to run here. One whose model is served no more is anybody's, once its time is over."""
        return record["model"] in self._models or time.time() >= record["expires_at"]

    async def _run(self, record: Record) -> None:
        """Run a batch that is claimed, and give up the claim. What it leaves is for whoever claims it next."""
        batch_id = record["id"]
        try:
            if record["status"] not in FINAL:  # it may have ended between the look at it and the claim
                await self._run_claimed(record)
        except LeaseLost:
            log.warning("batch %s goes on in another ingress", batch_id)
        except Exception:
            log.exception("batch %s is taken up again", batch_id)
        finally:
            with suppress(StoreUnavailable):  # then it ends by itself
                await self._leases.release(batch_id)

    async def _run_claimed(self, record: Record) -> None:
        batch_id = record["id"]
        holder = self._access.holder_named(record["tenant"])
        if holder is None:
            log.warning("batch %s waits for its tenant %r, which is not known", batch_id, record["tenant"])
            return

        async def call(body: Json) -> tuple[int, Mapping[str, str], Any]:
            return await self._call(record["endpoint"], body, holder)

        slots = self._slots.setdefault(holder.tenant.name, asyncio.Semaphore(self._at_once))
        held = self._leases.held(batch_id)
        await BatchJob(record, call, self._stores, held, at_once=self._at_once, slots=slots).run()

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
