"""Other values for constants of placement: `schedule.tuning` and `schedule.shadow_tuning`."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from core.scheduler_tuning import tuned


def changes_of(texts: Iterable[str]) -> dict[str, float]:
    """Return what texts `NAME=NUMBER` change. Raises ValueError."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise ValueError(f"{text!r} is no NAME=NUMBER") from None
    tuned(found)
    return found


def _by_name(given: Any) -> Any:
    """Take texts for the mapping that they mean."""
    texts = [given] if isinstance(given, str) else given
    return changes_of(map(str, texts)) if isinstance(texts, list | tuple) else given


def _checked(given: Mapping[str, float]) -> Mapping[str, float]:
    tuned(given)
    return given


TuningChanges = Annotated[
    Mapping[str, float], BeforeValidator(_by_name), AfterValidator(_checked), Field(title="NAME=NUMBER")
]
"""Constant of `core.scheduler_tuning.SchedulerTuning` -> the value that replaces its default."""
