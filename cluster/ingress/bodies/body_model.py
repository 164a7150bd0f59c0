"""What the objects of clients' bodies have in common: null is absence, and what becomes of fields that Baton does not know."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator
from pydantic_core import InitErrorDetails

from cluster.ingress.bodies.complaints import explain
from cluster.ingress.requests.conversation import top_field
from cluster.ingress.tenants.pieces import between_pieces
from core.errors import RequestError

UnknownFields = Literal["reject", "warn", "ignore"]
"""What becomes of a field that Baton does not know: the request is refused, or the answer goes on without the field."""
Neutral = Callable[[Any], bool]
NeutralFields = Mapping[str, tuple[Neutral, str]]
"""By name: which values change nothing and are accepted, and why other values are refused."""
M = TypeVar("M", bound=BaseModel)
_PIECE = 16 << 10


def anything(_: Any) -> bool:
    return True


def is_one_of(*values: Any) -> Neutral:
    return lambda value: any(value is v or (value == v and type(value) is type(v)) for v in values)


@dataclass(slots=True)
class Reading:
    """What validation finds in one body."""

    has_unknown: bool = False
    """Whether an object has a field that its model lacks."""
    notes: list[str] = field(default_factory=list[str])
    """What the answer does without, as sentences for the client."""


class Strict(BaseModel):
    """An object of a body. A null field counts as absent, unless the object must have it.

    `read_body` decides on fields that the model lacks."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    neutral: ClassVar[NeutralFields] = {}
    """Fields that Baton knows and does not support."""
    noted: ClassVar[NeutralFields] = {}
    """Values of these that are accepted as well, with a note that says why they change nothing."""

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, value: Any, info: ValidationInfo) -> Any:
        between_pieces()
        if not isinstance(value, dict):
            return value
        known, required = _names(cls)
        if None in value.values():
            value = {name: one for name, one in value.items() if one is not None or name in required}
        if isinstance(info.context, Reading) and not value.keys() <= known:
            info.context.has_unknown = True
        return value


def note(info: ValidationInfo, text: str) -> None:
    """Note for the client, from a validator, what the answer does without."""
    if isinstance(info.context, Reading) and text not in info.context.notes:
        info.context.notes.append(text)


def in_pieces(value: Any, validate: Callable[[Any], Any]) -> Any:
    """Validate a long list piece by piece, as a pydantic `WrapValidator` of items that validation does not change. Between two
    pieces, which take less than a millisecond, other threads have Python's lock."""
    if not isinstance(value, list) or len(value) <= _PIECE:
        return validate(value)
    for start in range(0, len(value), _PIECE):
        between_pieces()
        try:
            validate(value[start : start + _PIECE])
        except ValidationError as error:
            raise _further_on(error, start) from None
    return value


def _further_on(error: ValidationError, start: int) -> ValidationError:
    """Return the error of a piece as that of the list in which the piece begins at `start`."""
    details = [
        InitErrorDetails(
            type=each["type"],
            loc=(cast(int, each["loc"][0]) + start, *each["loc"][1:]),
            input=each["input"],
            ctx=each.get("ctx", {}),
        )
        for each in error.errors(include_url=False)
    ]
    return ValidationError.from_exception_data(error.title, details)


@cache
def _names(model: type[BaseModel]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of all fields, and of the required ones, as bodies have them."""
    fields = {each.alias or name: each for name, each in model.model_fields.items()}
    return frozenset(fields), frozenset(name for name, each in fields.items() if each.is_required())


def read_body(
    kind: type[M], body: Mapping[str, Any], unknown: UnknownFields = "reject"
) -> tuple[M, list[str]]:
    """Return the validated body, and what the answer does without, as sentences. Raises RequestError, naming the field."""
    reading = Reading()
    try:
        model = kind.model_validate(body, context=reading)
    except ValidationError as error:
        raise explain(error, body) from None
    left_out = list(_left_out(model, "", reading.notes)) if reading.has_unknown else []
    if left_out and unknown == "reject":
        raise RequestError(
            f"unknown parameter {left_out[0]!r}", field=top_field(left_out[0]), code="unknown_parameter"
        )
    if left_out and unknown == "warn":
        reading.notes.append(f"unknown and left out: {', '.join(left_out)}")
    return model, reading.notes


def validate(kind: type[M], body: Mapping[str, Any]) -> M:
    """Return the validated body. Raises RequestError, naming the field, also where a field is unknown."""
    return read_body(kind, body)[0]


def _left_out(value: Any, place: str, notes: list[str]) -> Iterator[str]:
    """Remove the fields that models lack, and yield the places of those that Baton does not know. Raises RequestError for a value
    that it knows and does not support."""
    if isinstance(value, list):
        for index, one in enumerate(value):
            yield from _left_out(one, f"{place}[{index}]", notes)
    if not isinstance(value, Strict):
        return
    between_pieces()
    extra = value.__pydantic_extra__ or {}
    for name, given in extra.items():
        where = f"{place}.{name}".lstrip(".")
        if name in value.noted and value.noted[name][0](given):
            notes.append(f"{where}: {value.noted[name][1]}")
        elif name not in value.neutral:
            yield where
        elif not value.neutral[name][0](given):
            why = value.neutral[name][1]
            raise RequestError(
                f"{where!r} is not supported: {why}", field=top_field(where), code="unsupported_parameter"
            )
    extra.clear()
    for name, each in type(value).model_fields.items():
        yield from _left_out(getattr(value, name), f"{place}.{each.alias or name}".lstrip("."), notes)
