"""Reads and works on requests' bodies: short ones where they come in, longer ones on threads that the tenants share fairly."""

from collections.abc import Callable
from hashlib import blake2b
from typing import TypeVar, cast

from fastapi import Request as HttpRequest
from pydantic import BaseModel

from cluster.ingress.bodies.body_model import UnknownFields, read_body
from cluster.ingress.generation.http_responses import unless_gone
from cluster.ingress.generation.request_params import ApiSettings
from cluster.ingress.http.request_body import read_json
from cluster.ingress.http.request_json import parse_json
from cluster.ingress.tenants.access import Tenant
from cluster.ingress.tenants.fair_threads import FairThreads, Steps, at_once, finished

_INLINE_BYTES = 4096
"""Work on a shorter body takes a few milliseconds at the most, and a thread would add to that."""
_FOUND = "baton.body"
"""The key in a request's scope of a body that was read to find its model."""

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


class BodyWork:
    """Every method raises ClientGone when nobody waits for the result any more, and Overloaded when too much of the tenant's
    waits."""

    def __init__(self, settings: ApiSettings) -> None:
        self._max_bytes, self._timeout_s = settings.max_body_bytes, settings.body_timeout_s
        self._unknown_fields: UnknownFields = settings.unknown_fields
        self._resumes = settings.resume_s > 0
        self._threads = FairThreads()

    @property
    def is_idle(self) -> bool:
        """Whether no body is worked on, nor waits for it."""
        return self._threads.is_idle

    async def read(self, http: HttpRequest, kind: type[M]) -> M:
        """Read and validate the body, unless that was done to find its model. Raises RequestError, naming the field."""
        if isinstance(found := http.scope.pop(_FOUND, None), kind):
            return found
        data = await read_json(http, self._max_bytes, self._timeout_s)

        def validated() -> tuple[tuple[M, list[str]], bytes]:
            read = read_body(kind, parse_json(data), self._unknown_fields)
            return read, _digest(http.scope["path"], data) if self._resumes else b""

        (body, notes), http.state.digest = await self._do(http, at_once(validated), 0, holds_lock=True)
        http.state.notes += notes
        return body

    async def find(self, http: HttpRequest, kind: type[M]) -> M:
        """Return the body, which the next `read` returns as well. Raises RequestError, naming the field."""
        http.scope[_FOUND] = body = await self.read(http, kind)
        return body

    async def do(self, http: HttpRequest, work: Callable[[], Steps[T]], num_more_bytes: int = 0) -> T:
        """Return the result of `work` on the body that was read, and on `num_more_bytes`. Raises what it raises."""
        return await self._do(http, work, num_more_bytes, holds_lock=False)

    async def _do(
        self, http: HttpRequest, work: Callable[[], Steps[T]], num_more_bytes: int, *, holds_lock: bool
    ) -> T:
        num_bytes, tenant = http.state.num_bytes + num_more_bytes, cast(Tenant, http.state.tenant)
        name, weight = tenant.name, tenant.rules.weight
        if num_bytes <= _INLINE_BYTES:
            self._threads.note(name, weight)
            return finished(work())
        running = self._threads.run(name, weight, num_bytes, work, holds_lock=holds_lock)
        return await unless_gone(http, running)


def _digest(path: str, data: bytes) -> bytes:
    digest = blake2b(path.encode(), digest_size=16)
    digest.update(data)
    return digest.digest()
