"""Triton's interpreter without the greater part of its work, none of which changes what kernels compute.

Before each launch, and again before each call of one of Triton's functions by another (`tl.sum` and `tl.cdiv` are such), it looks
through the whole of `triton.language` for what NumPy is to do in place of a GPU. It finds the same each time. Behind each sum,
difference and product of integers it computes whether they overflow, and drops the answer unless it debugs. It makes the type and
the shape of each value anew, and there are few of either."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any


class _Kept:
    """What a launch would undo its replacements with."""

    def restore(self) -> None: ...


def replace_once() -> None:
    """Let it look once for each module that has kernels, and keep what it has replaced: this process only interprets."""
    from triton.runtime import interpreter  # noqa: PLC0415 (some builds for GPUs lack it)

    replace_all: Callable[[Any], Any] = interpreter._patch_lang
    done, kept = set[str](), _Kept()

    def replace_of_module(function: Any) -> _Kept:
        if function.__module__ not in done:
            replace_all(function)
            done.add(function.__module__)
        return kept

    interpreter._patch_lang = replace_of_module
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    _keep_types(interpreter)
    _call_directly(interpreter)


def _keep_types(interpreter: Any) -> None:
    """Types of blocks, NumPy's types by the name of Triton's, and what values say of their shape: each made once."""
    core = interpreter.tl.core
    make, numpy_type = core.block_type.__init__, interpreter._get_np_dtype
    blocks: dict[Any, Any] = {}
    of_numpy: dict[str, Any] = {}
    shapes: dict[Any, tuple[Any, Any]] = {(): (core.constexpr(1), core.tuple([]))}

    def block_of(cls: Any, element: Any, shape: Any) -> Any:
        sizes = [getattr(size, "value", size) for size in shape]
        key = (element.name, getattr(element, "address_space", 0), *sizes)
        if key not in blocks:
            block = object.__new__(cls)
            make(block, element, shape)
            blocks[key] = block
        return blocks[key]

    def start_value(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = (*type.shape.values,) if type.is_block() else ()
        if sizes not in shapes:
            shapes[sizes] = core.constexpr(type.numel), core.tuple([core.constexpr(size) for size in sizes])
        self.numel, self.shape = shapes[sizes]

    def numpy_type_of(type: Any) -> Any:
        if type.name not in of_numpy:
            of_numpy[type.name] = numpy_type(type)
        return of_numpy[type.name]

    core.block_type.__new__, core.block_type.__init__ = block_of, lambda *_: None
    core.tensor.__init__ = start_value
    interpreter._get_np_dtype = numpy_type_of


def _call_directly(interpreter: Any) -> None:
    """Replacements that sort no arguments, and no look at shapes that are alike."""
    semantic, broadcast = interpreter.interpreter_semantic, interpreter.TritonSemantic.broadcast_impl_value

    def replace_one(owner: Any, name: str, member: Any, _: Any, *scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*args, **named)

        setattr(owner, name, call)

    def broadcast_unlike(self: Any, left: Any, right: Any) -> Any:
        is_block = left.type.is_block()
        if is_block == right.type.is_block() and (
            not is_block or left.type.shape.values == right.type.shape.values
        ):
            return left, right
        return broadcast(self, left, right)

    interpreter._patch_attr = replace_one
    interpreter.TritonSemantic.broadcast_impl_value = broadcast_unlike
