"""JSON Web Tokens of an identity provider: signed by a key that the configuration names, for this audience, and in their time.

Invariant: nothing that a token says decides how it is checked. Its `kid` chooses among the configured keys. Its `alg`, `jku` and
`x5u` choose nothing."""

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.ingress.tenants.api_keys import Scope
from core.config.jwt_config import JwtConfig
from core.errors import ConfigError, RequestError

if TYPE_CHECKING:
    import httpx
    from jwt import PyJWK

log = logging.getLogger(__name__)

LEEWAY_S = 30.0
"""How far clocks may differ."""
_LONGEST_TOKEN = 16 << 10
_LONGEST_KEYS = 1 << 20
_FETCH_S = 5.0
UNKNOWN_S = 10.0
"""How often keys are read again for tokens with an unknown one."""
_PREFIX = "baton:"


@dataclass(frozen=True, slots=True)
class Claims:
    subject: str
    tenant: str
    slo_class: str
    scopes: frozenset[Scope]


class WebTokens:
    """Belongs to one event loop."""

    def __init__(self, config: JwtConfig, transport: "httpx.AsyncBaseTransport | None" = None) -> None:
        """Raises ConfigError. `transport` reaches the URL of keys; None: the network."""
        try:
            import jwt  # noqa: PLC0415  # an extra
        except ImportError:
            raise ConfigError("jwt.issuer needs PyJWT: pip install 'baton-serve[oidc]'") from None
        self._jwt, self._config, self._transport = jwt, config, transport
        self._keys: dict[str, PyJWK] = {}
        """By their id; the only one without is under the empty one."""
        self._read_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None

    async def claims(self, token: str) -> Claims:
        """Check a token, and return what it says. Raises RequestError (401), which does not repeat it."""
        if len(token) > _LONGEST_TOKEN:
            raise _refused("it is too long")
        try:
            kid = str(self._jwt.get_unverified_header(token).get("kid", ""))
            key = await self._key(kid)
            if key is None:
                raise _refused("its key is not among those of jwt.keys")
            found = self._jwt.decode(
                token,
                key,
                algorithms=list(self._config.algorithms),
                audience=self._config.audience,
                issuer=self._config.issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except self._jwt.PyJWTError as error:
            raise _refused(str(error).rstrip(".")) from None
        return self._read(found)

    def _read(self, found: Mapping[str, Any]) -> Claims:
        config = self._config
        given = found.get(config.scope_claim) if config.scope_claim else None
        words = given.split() if isinstance(given, str) else given if isinstance(given, list) else None
        scopes = frozenset({Scope.INFERENCE})
        if words is not None:
            names = {str(word).removeprefix(_PREFIX) for word in words}
            scopes = frozenset(scope for scope in Scope if scope in names and scope is not Scope.OPEN)
        slo_class = str(found.get(config.class_claim, "")) if config.class_claim else ""
        return Claims(str(found["sub"])[:128], str(found.get(config.tenant_claim, "")), slo_class, scopes)

    async def _key(self, kid: str) -> "PyJWK | None":
        age_s = asyncio.get_running_loop().time() - self._read_at
        if kid not in self._keys and age_s > UNKNOWN_S:
            await asyncio.shield(self._read_again())
        elif age_s > self._config.refresh_s:
            self._read_again()
        return self._keys.get(kid)

    def _read_again(self) -> "asyncio.Task[None]":
        if self._reading is None or self._reading.done():
            self._reading = asyncio.get_running_loop().create_task(self._read_keys())
        return self._reading

    async def _read_keys(self) -> None:
        """Take over the keys as they are now. Where they cannot be read, those from before hold."""
        self._read_at = asyncio.get_running_loop().time()
        try:
            content = await (
                self._fetched() if "://" in self._config.keys else asyncio.to_thread(self._of_file)
            )
            keys = self._jwt.PyJWKSet.from_dict(json.loads(content)).keys
        except (OSError, ValueError, TimeoutError, self._jwt.PyJWTError) as error:
            log.error("jwt.keys: %s cannot be read: %s %s", self._config.keys, type(error).__name__, error)
            return
        self._keys = {key.key_id or "": key for key in keys if key.public_key_use in (None, "sig")}

    def _of_file(self) -> bytes:
        with Path(self._config.keys).open("rb") as file:
            return _short(file.read(_LONGEST_KEYS + 1))

    async def _fetched(self) -> bytes:
        """Return what the URL has. No proxy of the environment is used, and no redirect is followed. Raises OSError, ValueError
        and TimeoutError."""
        import httpx  # noqa: PLC0415 (schedulers and whoever deploys need no HTTP client)

        try:
            async with (
                asyncio.timeout(_FETCH_S),
                httpx.AsyncClient(trust_env=False, timeout=_FETCH_S, transport=self._transport) as client,
                client.stream("GET", self._config.keys, headers={"Accept-Encoding": "identity"}) as answer,
            ):
                if answer.status_code != 200:
                    raise OSError(f"the answer's status is {answer.status_code}")
                content = bytearray()
                async for part in answer.aiter_raw():
                    content += part
                    _short(content)
                return bytes(content)
        except httpx.HTTPError as error:
            raise OSError(f"{type(error).__name__} {error}") from error


def _short(content: bytes | bytearray) -> bytes:
    if len(content) > _LONGEST_KEYS:
        raise ValueError(f"it has more than {_LONGEST_KEYS} bytes")
    return bytes(content)


def _refused(why: str) -> RequestError:
    return RequestError(f"the token is not taken: {why}", status=401, code="invalid_token")
