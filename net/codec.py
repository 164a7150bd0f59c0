"""Turns messages into msgpack bytes and back, checked against their dataclasses' types.

A message is `[class name, field, ...]`; nested dataclasses are plain field lists. A newer peer may append fields that have
defaults: missing ones are filled in, surplus ones ignored. Anything else that does not fit raises ProtocolError."""

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgpack

from core.errors import ProtocolError
from core.messages import Message

Convert = Callable[[Any], Any]


def encode(message: Any) -> bytes:
    """Encode `message`, a dataclass."""
    kind = type(message)
    return msgpack.packb([kind.__name__, *_encoder(kind)(message)])  # type: ignore[return-value]


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


_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}


def _identity(value: Any) -> Any:
    return value


@cache
def _encoder(kind: type[Any]) -> Convert:
    hints = get_type_hints(kind)
    parts = [(attrgetter(f.name), _to_plain(hints[f.name])) for f in fields(kind)]
    if all(convert is _identity for _, convert in parts):
        names = [f.name for f in fields(kind)]
        get = attrgetter(*names)
        return (lambda value: [get(value)]) if len(names) == 1 else (lambda value: list(get(value)))
    return lambda value: [convert(get(value)) for get, convert in parts]


@cache
def _decoder(kind: type[Any]) -> Convert:
    hints = get_type_hints(kind)
    parts = [(f.name, _from_plain(hints[f.name])) for f in fields(kind)]
    required = sum(f.default is MISSING and f.default_factory is MISSING for f in fields(kind))

    def build(plain: Any) -> Any:
        if not isinstance(plain, list | tuple) or len(plain) < required:
            raise TypeError(f"{kind.__name__} needs {required} fields")
        return kind(**{name: convert(value) for (name, convert), value in zip(parts, plain, strict=False)})

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
