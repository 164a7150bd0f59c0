"""Which adapters a model is served with: `model.adapters`, the section `adapters`, and what a request says of one."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from core.config.config_section import Section
from core.errors import ConfigError

NAME = r"[A-Za-z0-9][A-Za-z0-9_./:-]{0,127}"
"""What a model or an adapter may be called, as a regular expression."""


def _by_name(given: Any) -> Any:
    """Take texts `NAME=PATH` for the mapping that they mean, and refuse what cannot be a name."""
    given = named_paths(given, "adapters")
    if isinstance(given, Mapping):
        for name in given:
            check_name(str(name))
    return given


def named_paths(given: Any, what: str) -> Any:
    """Return the mapping that texts `NAME=PATH` mean, and anything else as it is. Raises ValueError, saying `what` is named."""
    if isinstance(given, str):
        given = [given]
    return _from_texts(map(str, given), what) if isinstance(given, list | tuple) else given


def check_name(name: str) -> None:
    """Raise ValueError for what cannot be an adapter's name."""
    if not re.fullmatch(NAME, name):
        raise ValueError(
            f"{name!r} is no name for an adapter: give up to 128 letters, digits and any of _ . / : -"
        )


def _from_texts(texts: Iterable[str], what: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals:
            raise ValueError(f"{text!r} is no NAME=PATH")
        if name in found:
            raise ValueError(f"two {what} are called {name!r}")
        found[name] = path
    return found


Adapters = Annotated[Mapping[str, str], BeforeValidator(_by_name), Field(title="NAME=PATH")]
"""By the name that clients use, the folder that PEFT has written."""


class AdapterConfig(Section):
    folders: tuple[str, ...] = ()
    """Folders, as whole paths, in which adapters lie that may be loaded while the server runs; empty: none may. Every process
    must see them."""
    slots: int = Field(default=4, ge=1, le=1024)
    """Adapters that may be loaded so at once; memory for them is kept free from the start."""
    max_rank: int = Field(default=16, ge=1)
    """The largest rank of an adapter that is loaded so."""
    list_file: str = ""
    """File, as a whole path, in which releases up to 0.2 kept which adapters are loaded so. It is read where `serve.store`, which
    keeps that now, has no list yet. Every scheduler must see it."""

    @property
    def num_slots(self) -> int:
        """Return the slots that there are: none where nothing may be loaded."""
        return self.slots if self.folders else 0


def check_adapters(config: AdapterConfig) -> None:
    """Raise ConfigError for what cannot be used together."""
    named = {
        "adapters.folders": config.folders,
        "adapters.list_file": (config.list_file,) if config.list_file else (),
    }
    for key, paths in named.items():
        if partial := [path for path in paths if not Path(path).is_absolute()]:
            raise ConfigError(
                f"{key} has {partial[0]!r}: give whole paths, since processes have working folders of their own"
            )
    if config.list_file and not config.folders:
        raise ConfigError(
            "adapters.list_file keeps which adapters are loaded while the server runs: say in adapters.folders where they lie"
        )


@dataclass(frozen=True, slots=True)
class AdapterPlace:
    """An adapter that an instance is to have beside those of its configuration."""

    key: str
    folder: str


@dataclass(frozen=True, slots=True)
class HoldAdapters:
    """Which of those a rank is to have from now on, and no others."""

    adapters: tuple[AdapterPlace, ...]
    folders: tuple[str, ...]
    """`AdapterConfig.folders`, and `max_rank`: what the rank goes by itself."""
    max_rank: int


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
