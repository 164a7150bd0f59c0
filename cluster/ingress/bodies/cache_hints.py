"""What clients say of the time after a request, for caches, in Baton's words and in those of OpenAI and Anthropic."""

from collections.abc import Iterable
from math import inf
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from cluster.ingress.bodies.body_model import NeutralFields, Strict, anything
from core.errors import RequestError
from core.types import CacheHints

SessionName = Annotated[str, Field(min_length=1, max_length=256)]
Retention = Literal["in_memory", "24h", "none"]
_DAY_S = 86400.0
_TTLS_S = {"5m": 300.0, "1h": 3600.0}


class CacheHintsBody(Strict):
    """The field `cache_hints` of a request that generates."""

    session: SessionName | None = None
    """The conversation that this is a turn of, among the tenant's."""
    ttl_s: Annotated[float, Field(gt=0, le=_DAY_S)] | None = None
    """For so long after the answer its KV goes after that of others."""
    pin: bool = False
    """As `ttl_s`, for as long as the server allows."""
    release: bool = False
    """The session ends with this request: its KV is given up first."""
    prefetch: bool | Annotated[float, Field(ge=0, le=_DAY_S)] = True
    """Whether its KV is read back from lower tiers before the next turn, as the session's past lets expect it; or after how many
    seconds."""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "CacheHintsBody":
        if self.pin and self.ttl_s is not None:
            raise ValueError("pin is for as long as the server allows: it does not go with ttl_s")
        if self.release and (self.pin or self.ttl_s is not None):
            raise ValueError("release ends what pin and ttl_s keep: it does not go with them")
        return self


class CacheControl(Strict):
    """Anthropic's word at a block, which chat requests may have, too."""

    neutral: ClassVar[NeutralFields] = {"scope": (anything, "")}

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class SessionHintBody(Strict):
    """What is said of a session without a request."""

    session: SessionName
    action: Literal["release", "prefetch"]
    """`release`: it is over, and its KV is given up first. `prefetch`: its next turn is near, and its KV is read back."""


def hints_of(
    hints: CacheHintsBody | None, cache_key: str | None, retention: Retention | None
) -> tuple[CacheHints, bool]:
    """Return the hints, and whether the request's KV may be wanted again. `cache_key` and `retention` are OpenAI's
    `prompt_cache_key`, which names the session where `hints` name none, and `prompt_cache_retention`. Raises RequestError."""
    hints = hints or CacheHintsBody()
    session = hints.session or cache_key or ""
    if not session and (hints.prefetch is not True or hints.release):
        what = "release" if hints.release else "prefetch"
        raise RequestError(f"cache_hints.{what} needs a session", field="cache_hints.session")
    retain = not hints.release and retention != "none"
    ttl_s = inf if hints.pin else hints.ttl_s or (_DAY_S if retention == "24h" else 0.0)
    after_s = None if hints.prefetch is True else inf if hints.prefetch is False else hints.prefetch
    return CacheHints(session=session, ttl_s=ttl_s if retain else 0.0, prefetch_s=after_s), retain


def with_ttl(hints: CacheHintsBody | None, controls: Iterable[CacheControl | None]) -> CacheHintsBody | None:
    """Return the hints. Where they say nothing of the time, it is the longest of the `controls`."""
    if hints is not None and (hints.pin or hints.release or hints.ttl_s is not None):
        return hints
    ttl_s = max((_TTLS_S[control.ttl] for control in controls if control is not None), default=None)
    return hints if ttl_s is None else (hints or CacheHintsBody()).model_copy(update={"ttl_s": ttl_s})
