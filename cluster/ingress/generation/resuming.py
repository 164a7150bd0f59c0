"""Which answer a request is for: a new one, or one that has begun already, here or in an ingress that is gone."""

import json
from dataclasses import replace
from hashlib import sha256

from fastapi import Request as HttpRequest

from cluster.ingress.delivery.generator import Generator
from cluster.ingress.delivery.kept_streams import KeptStream
from cluster.ingress.generation.answer_identity import AnswerIdentity, parsed_name
from cluster.ingress.generation.event_numbers import parsed_event_id
from core.errors import RequestError
from core.stream_messages import ANOTHER_REQUEST, MISMATCH
from core.types import Resumption

_MAX_KEY = 255


class Resuming:
    def __init__(self, generator: Generator, keep_s: float) -> None:
        """`keep_s` is as in `Resumption`; 0: every answer ends with its connection."""
        self._generator, self._keep_s = generator, keep_s

    async def identity(self, http: HttpRequest, *, streams: bool) -> AnswerIdentity:
        """Return the answer that a request asks for by its headers. Raises RequestError, and ReplicaLost where a begun answer
        cannot be looked for."""
        key, last = http.headers.get("idempotency-key"), http.headers.get("last-event-id")
        if not self._keep_s or not (streams or key):
            return AnswerIdentity()
        identity, owner = AnswerIdentity(), http.state.holder.owner
        if last:
            written, after = parsed_event_id(last)
            if (found := parsed_name(written)) is None:
                raise RequestError(
                    f"Last-Event-ID {last[:80]!r} is not the id of an event of this server: send the last `id:` as it came",
                    field="Last-Event-ID",
                )
            identity = AnswerIdentity(name=found[0], created_at=found[1], after=after if streams else ())
        elif key is not None:
            identity = AnswerIdentity(name=_name_of(owner, key))
        if key or last:
            identity.is_repeated = True
            identity.kept = await self._kept(
                http, identity.name, owner, "Last-Event-ID" if last else "Idempotency-Key"
            )
        if identity.kept is not None:
            identity.created_at = identity.kept.begun_at
        identity.resumption = self._resumption(http, identity)
        return identity

    async def begun(
        self,
        http: HttpRequest,
        name: str,
        created_at: int,
        *,
        record: bytes,
        after: tuple[int, ...] = (),
        kept: KeptStream | None = None,
    ) -> AnswerIdentity:
        """Return an answer that has begun, with what is kept of it. Raises ReplicaLost."""
        kept = kept or await self.find(name, http.state.holder.owner)
        identity = AnswerIdentity(name=name, created_at=created_at, after=after, kept=kept)
        resumption = self._resumption(http, identity)
        digest = kept.digest if kept is not None else b""
        identity.resumption = replace(resumption, digest=digest, record=record)
        return identity

    def _resumption(self, http: HttpRequest, identity: AnswerIdentity) -> Resumption:
        return Resumption(
            stream=identity.name,
            owner=http.state.holder.owner,
            keep_s=self._keep_s,
            begun_at=identity.created_at,
            digest=http.state.digest,
        )

    async def find(self, name: str, owner: str) -> KeptStream | None:
        """Return what is kept of an owner's answer. Raises ReplicaLost."""
        return await self._generator.find_stream(name, owner) if self._keep_s else None

    async def _kept(self, http: HttpRequest, name: str, owner: str, header: str) -> KeptStream | None:
        kept = await self.find(name, owner)
        if kept is not None and kept.digest != http.state.digest:
            raise RequestError(
                ANOTHER_REQUEST.replace("Idempotency-Key", header), field=header, status=422, code=MISMATCH
            )
        return kept


def _name_of(owner: str, key: str) -> str:
    """Return the name of the answer to all requests of an owner with this key. Raises RequestError."""
    if not (key.isascii() and key.isprintable() and len(key) <= _MAX_KEY):
        raise RequestError(
            f"Idempotency-Key must be 1 to {_MAX_KEY} printable ASCII characters", field="Idempotency-Key"
        )
    return sha256(json.dumps([owner, key]).encode()).hexdigest()[:32]
