"""`jwt` in the configuration: tokens of an identity provider (OIDC) next to API keys."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from pydantic import Field

from core.config.config_section import Section
from core.errors import ConfigError

if TYPE_CHECKING:
    from core.config.cluster_config import ClusterConfig

Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]


class JwtConfig(Section):
    issuer: str = ""
    """Take JSON Web Tokens whose `iss` is exactly this, as `Authorization: Bearer <token>`. Empty: none are taken."""
    audience: str = ""
    """What a token's `aud` must have."""
    keys: str = ""
    """The issuer's public keys (JWKS): a whole path of a file, or an https URL. Redirects are not followed."""
    algorithms: tuple[Algorithm, ...] = Field(default=("RS256", "ES256"), min_length=1)
    """The signatures that are taken, whatever a token's header says. Secrets that both sides share (HS256) are not among them."""
    tenant_claim: str = "tenant"
    """The claim that names a tenant of `tenants`."""
    class_claim: str = ""
    """The claim that names the service class of requests that name none. Empty: their tenant's."""
    scope_claim: str = "scope"
    """The claim with scopes, as a list or with spaces between, each perhaps with `baton:` before it. Without it: `inference`. A
    tenant's tokens have no other scope."""
    refresh_s: float = Field(default=300.0, ge=1)
    """How long keys are taken before they are read again. A token with an unknown key has them read sooner."""

    @property
    def is_on(self) -> bool:
        return bool(self.issuer)


NO_JWT = JwtConfig()


def check_jwt(config: "ClusterConfig") -> None:
    """Raise ConfigError where tokens could not be checked."""
    jwt = config.jwt
    if not jwt.is_on:
        return
    if missing := [name for name in ("audience", "keys") if not getattr(jwt, name)]:
        raise ConfigError(
            f"jwt.issuer is set: set jwt.{missing[0]} as well, or tokens of others would be taken"
        )
    is_url = urlsplit(jwt.keys).scheme == "https" and bool(urlsplit(jwt.keys).hostname)
    if not is_url and not Path(jwt.keys).is_absolute():
        raise ConfigError(f"jwt.keys is {jwt.keys!r}: give an https URL, or a whole path of a file")
