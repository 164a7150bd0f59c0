"""API keys: `KEY`, or `KEY SCOPE,SCOPE`, which says what the key is for, in whichever place a key is written."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path

from pydantic import SecretStr

from core.errors import ConfigError


class Scope(StrEnum):
    """What a route needs of a key. Each route needs one."""

    OPEN = "open"
    """No key at all."""
    INFERENCE = "inference"
    """To use the models, on the holder's own account."""
    METRICS = "metrics"
    """To read how all tenants are served."""
    OPERATOR = "operator"
    """To change what all tenants are served."""


_OF_TENANTS = frozenset({Scope.INFERENCE})
_OF_SERVER = frozenset({Scope.INFERENCE, Scope.METRICS, Scope.OPERATOR})
ALL_SCOPES = _OF_SERVER
_KEY_OWNER = "*"
"""What begins the owner's name where that is a key. No tenant's name begins so."""


@dataclass(frozen=True)
class Key:
    text: str
    scopes: frozenset[Scope]
    made_id: str = ""
    """The id of a key that was made by API, whose text nobody has."""

    @cached_property
    def owner(self) -> str:
        """Who owns what is stored for a key without a tenant. It stays the same over restarts and does not give the key away."""
        if self.made_id:
            return _KEY_OWNER + self.made_id
        digest = hashlib.scrypt(self.text.encode(), salt=b"baton owner", n=1 << 12, r=8, p=1, dklen=16)
        return _KEY_OWNER + digest.hex()

    @property
    def id(self) -> str:
        """Return a name that may be shown."""
        return self.made_id or f"key_{self.owner.removeprefix(_KEY_OWNER)[:16]}"


def scopes_of(*, of_tenant: bool) -> frozenset[Scope]:
    """Return the scopes that a key may have."""
    return _OF_TENANTS if of_tenant else _OF_SERVER


def tenant_of_owner(owner: str) -> str:
    """Return the name of the tenant on whose account the owner's work goes."""
    return "" if owner.startswith(_KEY_OWNER) else owner


def may_see(owner: str, stored_by: str) -> bool:
    """Return whether `owner` may see what `stored_by` has stored. What was stored before keys had owners of their own stays seen
    by all keys without a tenant."""
    return stored_by == owner or (not stored_by and owner.startswith(_KEY_OWNER))


def visible_owners(owner: str) -> tuple[str, ...]:
    """Return whose records `may_see` lets `owner` see."""
    return (owner, "") if owner.startswith(_KEY_OWNER) else (owner,)


def read_keys(where: str, given: Sequence[SecretStr], file: str) -> tuple[SecretStr, ...]:
    """Return the keys that are given and those of the file. Raises ConfigError for one that `key_of` would not take."""
    keys = list(given)
    if file:
        try:
            lines = Path(file).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: cannot read {file}: {error}") from None
        found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not found:
            raise ConfigError(f"{where}: {file} holds no key")
        keys += map(SecretStr, found)
    for key in keys:
        key_of(key, of_tenant=where.startswith("tenants."), where=where.removesuffix("_file"))
    return tuple(keys)


def key_of(written: SecretStr, *, of_tenant: bool, where: str = "keys") -> Key:
    """Read a key as it is written. Raises ConfigError, which does not repeat the key."""
    text, *rest = written.get_secret_value().split() or [""]
    if not text or not text.isascii() or not text.isprintable() or len(rest) > 1:
        raise ConfigError(
            f"{where}: a key must be printable ASCII without spaces, or that, a space, and scopes with commas between"
        )
    if not rest:
        return Key(text, _OF_TENANTS if of_tenant else _OF_SERVER)
    allowed = _OF_TENANTS if of_tenant else _OF_SERVER
    names = rest[0].split(",")
    if unknown := [name for name in names if name not in allowed]:
        there = ", ".join(sorted(allowed))
        raise ConfigError(f"{where}: {unknown[0]!r} is no scope of such a key; there are: {there}")
    return Key(text, frozenset(map(Scope, names)))
