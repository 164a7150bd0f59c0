"""API keys that are made, listed and revoked while the cluster runs, as OpenAI's API has admin keys."""

from typing import Annotated, Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from cluster.ingress.generation.answering import Answering
from cluster.ingress.http.http_route import HttpRoute
from cluster.ingress.http.list_pages import page_of
from cluster.ingress.tenants.access import Access
from cluster.ingress.tenants.api_keys import Scope
from cluster.ingress.tenants.made_keys import MadeKey
from core.config.live_config import LimitsConfig, TenantName
from core.errors import RequestError

_PATH = "/v1/organization/admin_api_keys"


class NewKeyBody(BaseModel):
    """A key of a tenant, or of the server where `tenant` is empty."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=256)]
    expires_in_seconds: Annotated[int | None, Field(ge=1, le=10 * 366 * 86_400)] = None
    tenant: TenantName | Annotated[str, Field(max_length=0)] = ""
    scopes: list[Scope] = [Scope.INFERENCE]
    limits: LimitsConfig = LimitsConfig()
    """Limits of this key, next to its tenant's. None: those of each of the tenant's keys."""


class KeyRoutes:
    def __init__(self, answering: Answering, access: Access) -> None:
        self._answering, self._access = answering, access

    def routes(self) -> list[HttpRoute]:
        one = f"{_PATH}/{{key_id}}"
        return [
            HttpRoute("POST", _PATH, self.make, NewKeyBody, scope=Scope.OPERATOR),
            HttpRoute("GET", _PATH, self.listed, scope=Scope.OPERATOR),
            HttpRoute("GET", one, self.shown, scope=Scope.OPERATOR),
            HttpRoute("DELETE", one, self.revoke, scope=Scope.OPERATOR),
        ]

    async def make(self, http: HttpRequest) -> Response:
        """Make a key. This answer alone has its text. Raises RequestError and StoreUnavailable."""
        body = await self._answering.read(http, NewKeyBody)
        scopes = frozenset(body.scopes)
        self._access.check_new_key(body.tenant, scopes)
        made, text = await self._access.made_keys.make(
            body.name, body.tenant, scopes, body.limits, body.expires_in_seconds
        )
        return JSONResponse({**_shape(made), "value": text})

    async def listed(self, http: HttpRequest) -> Response:
        return page_of(http, [_shape(made) for made in await self._access.made_keys.all()])

    async def shown(self, http: HttpRequest) -> Response:
        key_id: str = http.path_params["key_id"]
        for made in await self._access.made_keys.all():
            if made.id == key_id:
                return JSONResponse(_shape(made))
        raise _no_key(key_id)

    async def revoke(self, http: HttpRequest) -> Response:
        key_id: str = http.path_params["key_id"]
        if not await self._access.made_keys.revoke(key_id):
            raise _no_key(key_id)
        return JSONResponse({"id": key_id, "object": "organization.admin_api_key.deleted", "deleted": True})


def _shape(made: MadeKey) -> dict[str, Any]:
    return {
        "object": "organization.admin_api_key",
        "id": made.id,
        "name": made.name,
        "redacted_value": made.hint,
        "created_at": made.created_at,
        "expires_at": made.expires_at,
        "last_used_at": None,
        "owner": {
            "type": "service_account",
            "object": "organization.project",
            "id": made.tenant,
            "name": made.tenant,
        },
        "tenant": made.tenant,
        "scopes": sorted(made.scopes),
        "limits": made.limits.model_dump(exclude_defaults=True),
    }


def _no_key(key_id: str) -> RequestError:
    return RequestError(f"there is no key {key_id[:64]!r}", status=404, code="key_not_found")
