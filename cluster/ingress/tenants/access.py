"""Who may ask, for which service class and how much: keys, tenants and their limits.

Invariant: no key is compared or logged as it is. Only its digest under a secret of this process is compared."""

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from pydantic import SecretStr

from cluster.ingress.tenants.account import Account
from cluster.ingress.tenants.api_keys import (
    ALL_SCOPES,
    Key,
    Scope,
    key_of,
    read_keys,
    scopes_of,
    tenant_of_owner,
)
from cluster.ingress.tenants.budgets import Budgets
from cluster.ingress.tenants.made_keys import MadeKeys
from cluster.ingress.tenants.shares import AskShares, Shares, own_book
from cluster.ingress.tenants.use_limits import LikelyOutput, Limited, UseLimits, limits_of
from cluster.ingress.tenants.web_tokens import Claims, WebTokens
from cluster.store.sql_store import SqlStore
from cluster.store.usage_port import Dimension
from core.config.cluster_config import ClusterConfig
from core.config.jwt_config import NO_JWT, JwtConfig
from core.errors import ConfigError, RequestError
from core.types import Slo

_DEFAULT_CLASS = "standard"


@dataclass(frozen=True, slots=True)
class TenantRules:
    keys: tuple[SecretStr, ...] = ()
    """As they are written, perhaps with scopes."""
    slo_classes: tuple[str, ...] = ()
    limits: UseLimits = field(default_factory=UseLimits)
    weight: float = 1.0
    models: tuple[str, ...] = ()
    """Models that may be seen and used, by name; empty: all."""
    per_key: UseLimits = field(default_factory=UseLimits)
    per_model: Mapping[str, UseLimits] = field(default_factory=dict[str, UseLimits])

    def parsed_keys(self, name: str) -> Sequence[Key]:
        """Return the keys of the tenant of this name. One that is written twice has the scopes of both."""
        found: dict[str, Key] = {}
        for written in self.keys:
            key = key_of(written, of_tenant=bool(name))
            scopes = found[key.text].scopes if key.text in found else frozenset[Scope]()
            found[key.text] = replace(key, scopes=key.scopes | scopes)
        return [*found.values()]


@dataclass(frozen=True, slots=True)
class Rules:
    """What the configuration says; may be replaced while the server runs."""

    slo_classes: Mapping[str, Slo]
    tenants: Mapping[str, TenantRules]
    """By name. The empty name stands for the holders of keys that belong to no tenant."""
    model_limits: Mapping[str, UseLimits] = field(default_factory=dict[str, UseLimits])
    jwt: JwtConfig = NO_JWT

    @property
    def asks_for_keys(self) -> bool:
        return self.jwt.is_on or any(tenant.keys for tenant in self.tenants.values())


def read_rules(config: ClusterConfig) -> Rules:
    """Read the rules, and the key files. Raises ConfigError."""
    serve = config.serve
    tenants = {"": TenantRules(read_keys("serve.api_keys_file", serve.api_keys, serve.api_keys_file))}
    for name, tenant in config.tenants.items():
        keys = read_keys(f"tenants.{name}.keys_file", tenant.keys, tenant.keys_file)
        tenants[name] = TenantRules(
            keys,
            tenant.slo_classes,
            limits_of(tenant),
            tenant.weight,
            tenant.models,
            limits_of(tenant.per_key),
            {model: limits_of(of_model) for model, of_model in tenant.per_model.items()},
        )
    holders: dict[str, str] = {}
    for name, tenant in tenants.items():
        for key in tenant.parsed_keys(name):
            if holders.setdefault(key.text, name) != name:
                raise ConfigError(f"tenants {holders[key.text]!r} and {name!r} share a key")
    of_models = {model: limits_of(of_model) for model, of_model in config.model_limits.items()}
    return Rules(config.slo_classes, tenants, of_models, config.jwt)


class Tenant:
    """Its name and rules show in no answer but its own."""

    def __init__(self, name: str, rules: TenantRules) -> None:
        self.name, self.rules = name, rules
        self.likely_output = LikelyOutput()

    def may_see(self, model: str) -> bool:
        """Return whether the model of this name exists for this tenant."""
        return not self.rules.models or model in self.rules.models

    def salt(self, wanted: str) -> str:
        """Return the salt of the tenant's prefixes. They are never shared between tenants; within one, `wanted` separates
        further."""
        return f"{self.name}/{wanted}" if self.name or wanted else ""


class KeyHolder:
    """Who asks: a tenant, by one of its keys."""

    def __init__(
        self, tenant: Tenant, key: Key | None, account: Account, owner: str = "", *, slo_class: str = ""
    ) -> None:
        """Without a key, everything is allowed: none is asked for, or the server itself asks on behalf of an `owner`.
        `slo_class`: that of requests that name none; empty: the tenant's."""
        self.tenant, self.account, self._key, self._owner = tenant, account, key, owner
        self.slo_class = slo_class

    @property
    def owner(self) -> str:
        """Who owns what is stored for this holder: a tenant, or a key that belongs to none."""
        return self.tenant.name or (self._key.owner if self._key else self._owner)

    @property
    def key_id(self) -> str:
        """Return a name of the key that may be shown; empty without one."""
        return self._key.id if self._key else ""

    def check_scope(self, path: str, needed: Scope) -> None:
        """Raise RequestError (403) where the key is not for such routes."""
        scopes = self._key.scopes if self._key else ALL_SCOPES
        if needed not in scopes:
            raise RequestError(
                f"{path} needs a key with the scope {needed}; this one has {', '.join(sorted(scopes))}. Keys with more are among "
                "serve.api_keys",
                status=403,
                code="insufficient_scope",
            )


class Access:
    """`rules` may be replaced at any time; tenants that stay keep what they have used."""

    def __init__(self, rules: Rules, now: Callable[[], float] = time.monotonic) -> None:
        self._secret, self._now = secrets.token_bytes(32), now
        self._shares = Shares(own_book(now), now)
        self._web_tokens = WebTokens(rules.jwt) if rules.jwt.is_on else None
        self.use_store(SqlStore())
        self._tenants: dict[str, Tenant] = {}
        self.replace(rules)

    def replace(self, rules: Rules) -> None:
        old = self._tenants
        self._rules = rules
        self._tenants = {name: old.get(name) or Tenant(name, rules.tenants[name]) for name in rules.tenants}
        self._holders: dict[bytes, KeyHolder] = {}
        for name, tenant in self._tenants.items():
            tenant.rules = rules.tenants[name]
            self._holders |= {
                self._digest(key.text.encode()): self._holder(tenant, key)
                for key in tenant.rules.parsed_keys(name)
            }

    def use_store(self, store: SqlStore) -> None:
        """Take keys that were made by API, and refuse what budgets do not allow. Before, there are none."""
        self._budgets, self.made_keys = Budgets(store), MadeKeys(store)

    def lease_from(self, ask: AskShares) -> None:
        """Share the limits with all ingresses. Before, this one has all of each."""
        self._shares.lease_from(ask)

    @property
    def asks_for_keys(self) -> bool:
        return self._rules.asks_for_keys

    def holder_of(self, authorization: str) -> KeyHolder:
        """Return the holder of the key in an Authorization header. Raises RequestError (401).

        Keys are found by a digest that no client can steer, so the time that it takes tells nothing about them."""
        if not self._rules.asks_for_keys:
            return self._holder(self._tenants[""], None)
        scheme, _, given = authorization.partition(" ")
        holder = self._holders.get(self._digest(given.strip().encode("latin-1")))
        if scheme.lower() != "bearer" or holder is None:
            raise RequestError(
                "a valid API key is required: Authorization: Bearer <key>, or x-api-key: <key>",
                status=401,
                code="invalid_api_key",
            )
        return holder

    async def authenticated(self, authorization: str) -> KeyHolder:
        """Return the holder of a key of the configuration, of one that was made by API, or of a token. Raises RequestError
        (401)."""
        try:
            return self.holder_of(authorization)
        except RequestError:
            scheme, _, given = authorization.partition(" ")
            if scheme.lower() != "bearer" or (found := await self._other_holder(given.strip())) is None:
                raise
            return found

    async def _other_holder(self, given: str) -> KeyHolder | None:
        if self._web_tokens is not None and given.count(".") == 2:
            return self._token_holder(await self._web_tokens.claims(given))
        made = await self.made_keys.found(given)
        tenant = None if made is None else self._tenants.get(made.tenant)
        return (
            None if made is None or tenant is None else self._holder(tenant, made.key, limits=made.use_limits)
        )

    def _token_holder(self, claims: Claims) -> KeyHolder:
        """Return who a token stands for. Only a tenant's token is for inference."""
        tenant = self._tenants.get(claims.tenant)
        if tenant is None or (not claims.tenant and Scope.INFERENCE in claims.scopes):
            claim = self._rules.jwt.tenant_claim
            raise RequestError(
                f"the token is not taken: its claim {claim!r} names no tenant of this server",
                status=401,
                code="invalid_token",
            )
        key = Key("", claims.scopes & scopes_of(of_tenant=bool(claims.tenant)), f"sub_{claims.subject}")
        return self._holder(tenant, key, slo_class=claims.slo_class)

    def check_new_key(self, tenant: str, scopes: frozenset[Scope]) -> None:
        """Raise RequestError where no such key may be made."""
        if not self._rules.asks_for_keys:
            raise RequestError(
                "this server asks for no key, so one more would shut nobody out: put a key with the scope operator into "
                "serve.api_keys, and restart it"
            )
        if tenant not in self._tenants:
            there = ", ".join(name for name in self._tenants if name) or "none"
            raise RequestError(f"there is no tenant {tenant!r}; there are: {there}", field="tenant")
        allowed = scopes_of(of_tenant=bool(tenant))
        if not scopes or not scopes <= allowed:
            whose = "a tenant's key" if tenant else "a key"
            raise RequestError(f"{whose} has scopes among {', '.join(sorted(allowed))}", field="scopes")

    def holder_named(self, owner: str) -> KeyHolder | None:
        """Return who goes on with what an owner has begun; None where there is no such tenant any more."""
        tenant = self._tenants.get(tenant_of_owner(owner))
        return None if tenant is None else self._holder(tenant, None, owner)

    def slo(
        self,
        tenant: Tenant,
        header: str | None,
        service_tier: str | None,
        priority: int = 0,
        own: Mapping[str, Slo] = MappingProxyType({}),
    ) -> Slo:
        """Return the class that was asked for, or the tenant's default, put before others (`priority` < 0) or behind them. `own`:
        classes whose targets are the model's.

        No request gets above the highest class that the tenant may use, nor below the lowest that there is. Raises
        RequestError."""
        classes = {**self._rules.slo_classes, **own}
        slo = self._class(tenant, header, service_tier, classes)
        if not priority:
            return slo
        allowed = {
            name: classes[name].priority for name in tenant.rules.slo_classes or classes if name in classes
        }
        highest, wanted = max((slo.priority, *allowed.values())), slo.priority - priority
        if wanted > highest:
            raise RequestError(
                f"priority {priority} is above what this tenant may have: {slo.priority - highest} is the least for the "
                f"class {slo.name!r}",
                field="priority",
            )
        lowest = min((slo.priority, *(one.priority for one in classes.values())))
        return replace(slo, priority=max(wanted, lowest))

    def _class(
        self, tenant: Tenant, header: str | None, service_tier: str | None, classes: Mapping[str, Slo]
    ) -> Slo:
        allowed = tenant.rules.slo_classes or tuple(classes)
        tier = None if service_tier in (None, "auto", "default") else service_tier
        name, field = (header, "x-slo-class") if header is not None else (tier, "service_tier")
        if name is None:
            default = tenant.rules.slo_classes[0] if tenant.rules.slo_classes else _DEFAULT_CLASS
            return classes.get(default, Slo())
        if name not in allowed or name not in classes:
            raise RequestError(f"unknown {field} {name!r}; there are {', '.join(allowed)}", field=field)
        return classes[name]

    def _holder(
        self,
        tenant: Tenant,
        key: Key | None,
        owner: str = "",
        *,
        limits: UseLimits | None = None,
        slo_class: str = "",
    ) -> KeyHolder:
        whose = f"tenant {tenant.name!r}" if tenant.name else "whoever has no tenant"
        limited = [Limited(whose, tenant.rules.limits, {"tenant": tenant.name})]
        own = limits or tenant.rules.per_key
        if key is not None and own != UseLimits():
            limited.append(Limited(f"key {key.id!r}", own, {"key_id": key.id}))
        account = Account(
            self._shares, self._now, limited, partial(self._with_model, tenant), self._check_budget
        )
        return KeyHolder(tenant, key, account, owner, slo_class=slo_class)

    def _with_model(self, tenant: Tenant, model: str) -> list[Limited]:
        of_all, own = _of(model, self._rules.model_limits), _of(model, tenant.rules.per_model)
        whose = f"tenant {tenant.name!r} with model {model!r}"
        by: dict[Dimension, str] = {"tenant": tenant.name, "model": model}
        return [
            *(Limited(f"model {model!r}", limits, {"model": model}) for limits in of_all),
            *(Limited(whose, limits, by) for limits in own),
        ]

    def _check_budget(self, limited: Limited) -> None:
        self._budgets.check(limited)

    def _digest(self, key: bytes) -> bytes:
        return hmac.digest(self._secret, key, hashlib.sha256)


def _of(model: str, limits: Mapping[str, UseLimits]) -> list[UseLimits]:
    return [limits[model]] if model in limits else []
