"""Keys that operators make while the cluster runs. The store has their digests, and every ingress reads them again and again.

A key is 256 random bits, so its digest needs no salt and no slow function to keep it secret."""

import asyncio
import hashlib
import json
import logging
import secrets
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cluster.ingress.tenants.api_keys import Key, Scope
from cluster.ingress.tenants.use_limits import UseLimits, limits_of
from cluster.store.sql_store import SqlStore
from cluster.store.store_port import StoreRecord
from core.config.live_config import LimitsConfig
from core.errors import RequestError, StoreUnavailable

log = logging.getLogger(__name__)

KIND = "api_key"
LOOK_S = 2.0
"""How long a key that was revoked may still be taken."""
UNKNOWN_S = 0.5
"""How often the store is asked for keys that are not known here."""
_PREFIX = "sk-baton-"


@dataclass(frozen=True, slots=True)
class MadeKey:
    id: str
    name: str
    tenant: str
    scopes: frozenset[Scope]
    limits: LimitsConfig
    hint: str
    """The key with its middle left out."""
    digest: str
    created_at: int
    expires_at: int | None

    @property
    def key(self) -> Key:
        return Key("", self.scopes, self.id)

    @property
    def use_limits(self) -> UseLimits | None:
        """Return its own limits; None where it has those of each of its tenant's keys."""
        limits = limits_of(self.limits)
        return None if limits == UseLimits() else limits


class MadeKeys:
    """Belongs to one event loop."""

    def __init__(self, store: SqlStore, now: Callable[[], float] = time.time) -> None:
        self._store, self._now = store, now
        self._by_digest: dict[str, MadeKey] = {}
        self._looked_at = float("-inf")
        self._looking: asyncio.Task[None] | None = None

    async def make(
        self, name: str, tenant: str, scopes: frozenset[Scope], limits: LimitsConfig, expires_in_s: int | None
    ) -> tuple[MadeKey, str]:
        """Return a new key, and its text, which nobody has afterwards. Raises RequestError and StoreUnavailable."""
        if not self._store.outlives_process:
            raise RequestError("keys are made in a database: name one in serve.store")
        text, now = _PREFIX + secrets.token_urlsafe(32), int(self._now())
        made = MadeKey(
            f"key_{uuid.uuid4().hex}",
            name,
            tenant,
            scopes,
            limits,
            f"{text[:12]}...{text[-4:]}",
            _digest(text),
            now,
            None if expires_in_s is None else now + expires_in_s,
        )
        record = StoreRecord(id=made.id, kind=KIND, owner=tenant, body=_written(made))
        await self._store.put([replace(record, lives_s=expires_in_s)])
        self._by_digest[made.digest] = made
        return made, text

    async def all(self) -> list[MadeKey]:
        """Return those that there are, the newest first. Raises StoreUnavailable."""
        return [_read(record) for record in await self._store.find(KIND)]

    async def revoke(self, key_id: str) -> bool:
        """Delete a key. Returns False where there is none. Raises StoreUnavailable."""
        record = await self._store.get(key_id)
        if record is None or record.kind != KIND:
            return False
        await self._store.delete(key_id)
        self._by_digest = {digest: made for digest, made in self._by_digest.items() if made.id != key_id}
        return True

    async def found(self, text: str) -> MadeKey | None:
        """Return the key of this text. While the database is gone, those that were known are taken."""
        if not text.startswith(_PREFIX):
            return None
        age_s, digest = asyncio.get_running_loop().time() - self._looked_at, _digest(text)
        if digest not in self._by_digest and age_s > UNKNOWN_S:
            await asyncio.shield(self._look_again())
        elif age_s > LOOK_S:
            self._look_again()
        made = self._by_digest.get(digest)
        is_over = made is not None and made.expires_at is not None and made.expires_at <= self._now()
        return None if is_over else made

    def _look_again(self) -> "asyncio.Task[None]":
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look())
        return self._looking

    async def _look(self) -> None:
        self._looked_at = asyncio.get_running_loop().time()
        try:
            self._by_digest = {made.digest: made for made in await self.all()}
        except (StoreUnavailable, OSError) as error:
            log.warning("keys that were made by API are those that were known before: %s", error)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _written(made: MadeKey) -> bytes:
    values: dict[str, Any] = {
        "name": made.name,
        "scopes": sorted(made.scopes),
        "limits": made.limits.model_dump(),
        "hint": made.hint,
        "digest": made.digest,
        "created_at": made.created_at,
        "expires_at": made.expires_at,
    }
    return json.dumps(values).encode()


def _read(record: StoreRecord) -> MadeKey:
    values = json.loads(record.body)
    scopes = frozenset(map(Scope, values["scopes"]))
    limits = LimitsConfig.model_validate(values["limits"])
    more = (values["hint"], values["digest"], values["created_at"], values["expires_at"])
    return MadeKey(record.id, values["name"], record.owner, scopes, limits, *more)
