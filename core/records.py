"""Classes of which each step makes objects."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True)
def record(*, kw_only: bool = False) -> Callable[[type[_T]], type[_T]]:
    """As `dataclass(frozen=True, slots=True)`, but that the type checker alone holds what is frozen: at run time an object of ten
    fields would take three times as long to make."""
    return dataclass(slots=True, unsafe_hash=True, kw_only=kw_only)
