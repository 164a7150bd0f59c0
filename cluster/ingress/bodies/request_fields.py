"""Fields that the bodies of several APIs have. pydantic is strict: "5" is no number and true is no integer."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, WrapValidator

from cluster.ingress.bodies.body_model import Strict, in_pieces
from cluster.ingress.requests.generation_request import SAMPLING

Temperature = Annotated[float, Field(ge=0, le=2)]
Probability = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1)]
MinP = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(gt=0, le=10)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
ThinkingTokens = Annotated[int, Field(ge=0)]
"""Tokens after which the end of reasoning is forced, as in vLLM."""
ServiceTier = Annotated[str, Field(max_length=64)]
CacheSalt = Annotated[str, Field(max_length=256)]
CacheKey = Annotated[str, Field(max_length=256)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Detail = Literal["auto", "low", "high", "original"]
"""`low` makes a large image smaller. With the others a model sees as finely as its processor lets it."""
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
MAX_STOPS = 64
_MAX_STOP_CHARACTERS = 4096
"""The most characters of all stop strings together: each token's text is compared with all of them."""
TokenNumber = Annotated[int, Field(ge=0)]
# A list ends at its first bad item: a million complaints would hold up everybody's tokens while they are written.
Ids = Annotated[list[TokenNumber], Field(min_length=1, fail_fast=True), WrapValidator(in_pieces)]
Prompts = (
    str
    | Ids
    | Annotated[list[str], Field(min_length=1, fail_fast=True)]
    | Annotated[list[Ids], Field(min_length=1, fail_fast=True)]
)
Truncation = Annotated[int, Field(ge=-1)]
"""vLLM's field: so many tokens of a prompt are taken; -1 means as many as the model takes."""
MAX_BIASES = 1024
MAX_TEXTS = 2048
"""The most texts of one request for vectors, as with OpenAI."""
ANY_VALUE, ANY_NUMBER, ANY_TEXT = (
    WithJsonSchema(schema)
    for schema in ({}, *({"anyOf": [{"type": kind}, {"type": "null"}]} for kind in ("number", "string")))
)
"""For fields that /openapi.json describes without their bounds."""


def _not_too_many(biases: Any) -> Any:
    """Refuse too many biases before each of them is validated, which takes time."""
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        raise ValueError(f"{len(biases)} token ids exceed the limit of {MAX_BIASES}")
    return biases


def _not_too_long(stops: list[str]) -> list[str]:
    if (length := sum(map(len, stops))) > _MAX_STOP_CHARACTERS:
        raise ValueError(f"{length} characters together exceed the limit of {_MAX_STOP_CHARACTERS}")
    return stops


Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS), AfterValidator(_not_too_long)]
BadWord = Annotated[str, Field(min_length=1, max_length=256)]
Biases = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_not_too_many)]


def sampling_of(body: Strict) -> dict[str, float]:
    """Return what a body says of the sampling."""
    said = {name: getattr(body, name, None) for name in SAMPLING}
    return {name: value for name, value in said.items() if value is not None}


def as_tuple(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())
