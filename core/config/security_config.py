"""`security` in the configuration: how what crosses hosts is encrypted."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from core.config.config_section import Section
from core.errors import ConfigError

if TYPE_CHECKING:
    from core.config.cluster_config import ClusterConfig


def _word(value: Any) -> Any:
    """Return `off` for false, as which YAML reads it."""
    return "off" if value is False else value


_Tls = Annotated[
    Literal["auto", "files", "off"],
    BeforeValidator(_word),
    Field(json_schema_extra={"enum": ["auto", "files", "off", False], "type": ["string", "boolean"]}),
]


class SecurityConfig(Section):
    tls: _Tls = "auto"
    """Mutual TLS 1.3 between processes on different hosts. `auto`: by an authority that belongs to the cluster key. `files`: by
    `tls_cert`, `tls_key` and `tls_ca`. Connections within a host are not encrypted."""
    tls_cert: str = ""
    """PEM file of this process's certificate. Files that are renewed are taken by new connections, without a restart."""
    tls_key: str = ""
    """PEM file of the certificate's private key."""
    tls_ca: str = ""
    """PEM file of the authority that has signed every process's certificate."""
    strict: bool = False
    """Refuse to start where something would cross hosts unencrypted. Otherwise the log names it at the start."""


AUTO = SecurityConfig()


def check_security(config: "ClusterConfig") -> None:
    """Raise ConfigError for keys that do not go together."""
    security = config.security
    files = {name: getattr(security, name) for name in ("tls_cert", "tls_key", "tls_ca")}
    given = [name for name, path in files.items() if path]
    if security.tls == "files" and len(given) < len(files):
        missing = next(name for name in files if name not in given)
        raise ConfigError(
            f"security.tls is files: set security.tls_cert, tls_key and tls_ca ({missing} is empty)"
        )
    if given and security.tls != "files":
        raise ConfigError(
            f"security.{given[0]} is set, and security.tls is {security.tls}: set security.tls to files"
        )
    if security.strict and security.tls == "off":
        raise ConfigError(
            "security.strict encrypts all that crosses hosts: set security.tls to auto or files"
        )
