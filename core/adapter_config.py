"""Which adapters a model is served with: `model.adapters`, and what a request says of one."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./:-]{0,127}")


def _by_name(given: Any) -> Any:
    """Take texts `NAME=PATH` for the mapping that they mean, and refuse what cannot be a name."""
    if isinstance(given, str):
        given = [given]
    if isinstance(given, list | tuple):
        given = _from_texts(map(str, given))
    if isinstance(given, Mapping):
        for name in given:
            if not _NAME.fullmatch(str(name)):
                raise ValueError(
                    f"{name!r} is no name for an adapter: give up to 128 letters, digits and any of _ . / : -"
                )
    return given


def _from_texts(texts: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals:
            raise ValueError(f"{text!r} is no NAME=PATH")
        if name in found:
            raise ValueError(f"two adapters are called {name!r}")
        found[name] = path
    return found


Adapters = Annotated[Mapping[str, str], BeforeValidator(_by_name), Field(title="NAME=PATH")]
"""By the name that clients use, the folder that PEFT has written."""


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    key: str
    """How requests name it."""
    folder: str


def adapter_key(name: str, revision: str) -> str:
    """Return what requests carry: KV and answers are those of these very weights."""
    return f"{name}@{revision}"


def adapter_name(key: str) -> str:
    """Return the name in a request's `adapter`; empty for the model as it is."""
    return key.rpartition("@")[0]
