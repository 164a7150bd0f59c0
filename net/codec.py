"""Turns messages into msgpack bytes and back, checked against their dataclasses' types.

A message is `[name, field, ...]`, its class's name as a rule (`_WIRE_NAMES`); nested dataclasses are plain field lists, which end
before their last fields where all of these have their defaults. A newer peer may append fields that have defaults: missing ones
are filled in, surplus ones ignored. Anything else that does not fit raises ProtocolError.

An ordinary token is a dataclass of ten fields. It travels as the four that it needs, whose types are looked at together."""

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import takewhile
from operator import attrgetter
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

from core.errors import ProtocolError
from core.messages import Message, PlaceReply, PlaceRequest

Convert = Callable[[Any], Any]
D = TypeVar("D")
_AS_THEY_ARE = (int, str, bool, bytes)
"""Types whose values are what msgpack gives."""


def encode(message: Any) -> bytes:
    """Encode `message`, a dataclass."""
    kind = type(message)
    return msgpack.packb([_wire_name(kind), *_encoder(kind)(message)])  # type: ignore[return-value]


def decode(data: bytes | memoryview) -> Message:
    """Decode a message of this class. Raises ProtocolError."""
    return decode_one_of(_KINDS, data)


def decode_one_of(kinds: Mapping[str, type[Any]], data: bytes | memoryview) -> Any:
    """Decode a message of one of these classes, by name. Raises ProtocolError."""
    try:
        plain: Any = msgpack.unpackb(data, strict_map_key=True)
        kind = kinds[plain[0]]
        return _decoder(kind)(plain[1:])
    except (KeyError, IndexError, TypeError, ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(
            f"unreadable message of {len(data)} bytes: {type(error).__name__}: {error}"
        ) from error


def read_fields(kind: type[D], plain: Any) -> D:
    """Return a dataclass from a map of its fields by name, checked against their types. Names that it lacks are ignored. Raises
    KeyError, TypeError or ValueError."""
    return kind(**{name: read(plain[name]) for name, read in _readers(kind).items() if name in plain})


@cache
def _readers(kind: type[Any]) -> dict[str, Convert]:
    return {name: _from_plain(hint) for name, hint in get_type_hints(kind).items()}


_WIRE_NAMES: dict[type[Any], str] = {PlaceRequest: "Place", PlaceReply: "Placed"}
"""Messages that have another name than their class. Peers of earlier releases and recorded decisions know these names."""


def _wire_name(kind: type[Any]) -> str:
    return _WIRE_NAMES.get(kind, kind.__name__)


_KINDS: dict[str, type[Any]] = {_wire_name(kind): kind for kind in get_args(Message)}


def _identity(value: Any) -> Any:
    return value


@cache
def _encoder(kind: type[Any]) -> Convert:
    hints, known = get_type_hints(kind), fields(kind)
    defaults = _last_defaults(known)
    needed = len(known) - len(defaults)
    converts = [_to_plain(hints[f.name]) for f in known]
    whole, short = _each(converts), _each(converts[:needed])
    get = _values([f.name for f in known])

    def plain(value: Any) -> Any:
        values = get(value)
        return short(values[:needed]) if defaults and values[needed:] == defaults else whole(values)

    return plain


def _values(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Return what takes the values of an object's fields."""
    if not names:
        return lambda _: ()
    if len(names) == 1:
        get = attrgetter(*names)
        return lambda value: (get(value),)
    return attrgetter(*names)


def _last_defaults(known: Sequence[Field[Any]]) -> tuple[Any, ...]:
    """Return the defaults of the last fields, behind the last that has none."""
    found = [*takewhile(lambda default: default is not MISSING, (f.default for f in reversed(known)))]
    return tuple(reversed(found))


def _each(converts: Sequence[Convert]) -> Convert:
    """Return what converts as many values."""
    if all(convert is _identity for convert in converts):
        return _identity
    return lambda values: [convert(value) for convert, value in zip(converts, values, strict=True)]


@cache
def _decoder(kind: type[Any]) -> Convert:
    hints, known = get_type_hints(kind), fields(kind)
    names, reads = [f.name for f in known], [_from_plain(hints[f.name]) for f in known]
    scalars = tuple(hints[name] if hints[name] in _AS_THEY_ARE else None for name in names)
    required = sum(f.default is MISSING and f.default_factory is MISSING for f in known)

    def build(plain: Any) -> Any:
        if not isinstance(plain, list | tuple) or len(plain) < required:
            raise TypeError(f"{kind.__name__} needs {required} fields")
        if tuple(map(type, plain)) == scalars[: len(plain)]:
            return kind(**dict(zip(names, plain, strict=False)))
        return kind(**{name: read(value) for name, read, value in zip(names, reads, plain, strict=False)})

    return build


def _to_plain(hint: Any) -> Convert:
    inner = _strip_optional(hint)
    if inner is not hint:
        convert = _to_plain(inner)
        return _identity if convert is _identity else lambda v: None if v is None else convert(v)
    if is_dataclass(hint):
        return _encoder(hint)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        items = [_to_plain(a) for a in get_args(hint) if a is not Ellipsis]
        if all(item is _identity for item in items):
            return _identity
        if Ellipsis in get_args(hint):
            return lambda v: [items[0](x) for x in v]
        return lambda v: [c(x) for c, x in zip(items, v, strict=True)]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return lambda v: v.value
    return _identity


def _from_plain(hint: Any) -> Convert:
    inner = _strip_optional(hint)
    if inner is not hint:
        convert = _from_plain(inner)
        return lambda v: None if v is None else convert(v)
    if is_dataclass(hint):
        return _decoder(hint)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        return _tuple_reader(get_args(hint))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint
    if get_origin(hint) is Literal:
        return _word_reader(get_args(hint))
    return _scalar_reader(hint)


def _tuple_reader(args: tuple[Any, ...]) -> Convert:
    if Ellipsis not in args:
        items = [_from_plain(a) for a in args]
        return lambda v: tuple([c(x) for c, x in zip(items, v, strict=True)])
    if args[0] is int:
        return _int_tuple
    item = _from_plain(args[0])
    return lambda v: tuple([item(x) for x in _as_list(v)])


def _int_tuple(value: Any) -> tuple[int, ...]:
    result = tuple(_as_list(value))
    if set(map(type, result)) - {int}:
        raise TypeError("expected integers")
    return result


def _as_list(value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise TypeError(f"expected a list, got {type(value).__name__}")
    return value


def _scalar_reader(kind: type[Any]) -> Convert:
    accepted = (float, int) if kind is float else (kind,)

    def read(value: Any) -> Any:
        if type(value) not in accepted:
            raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
        return value

    return read


def _word_reader(words: tuple[Any, ...]) -> Convert:
    def read(value: Any) -> Any:
        if not isinstance(value, str) or value not in words:
            raise ValueError(f"expected one of {', '.join(words)}, got {value!r}")
        return value

    return read


def _strip_optional(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        return next(a for a in get_args(hint) if a is not type(None))
    return hint
