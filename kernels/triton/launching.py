"""Launches of kernels that take a host little time.

Triton works out anew at each launch what a kernel is compiled for, which takes several times what the launch itself does. Here
the machine code is found by all that it can depend on, and Triton is asked only for what is not known yet: types, tensors'
element types, whole numbers that it specialises kernels for, constants and options, and that all tensors begin at multiples of
16 bytes. A launch with a tensor that does not goes Triton's own way each time. Of a tensor's descriptor the element type and the
block count; that it begins where copies can is checked when it is made.

From Hopper on a kernel may be launched while the one before it runs (programmatic dependent launch): its programs take the places
of those that have ended, and wait in `await_inputs`. Between two kernels a GPU is idle for a microsecond otherwise."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.triton.platform import INTERPRETED, capability

_MOST_KNOWN = 4096
"""Variants of one kernel that are remembered at a time."""

COMPILED = tl.constexpr(not INTERPRETED)
_OVERLAPS_FROM = 90

Launch = Callable[..., object]
_Key = tuple[object, ...]


def current_stream(device: torch.device) -> int | None:
    """Return the handle of the stream on which launches on `device` go. None: there is no such device."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else None


class Kernel:
    """A kernel, launched as Triton's are: `kernel[grid](*arguments, **constants)`, with the same names of constants each time."""

    def __init__(
        self,
        function: Any,
        stream: Callable[[torch.device], int | None] = current_stream,
        *,
        overlaps: bool = False,
    ) -> None:
        """`function`: of `triton.jit`. `overlaps`: see `launchable`."""
        self._function, self._stream, self._overlaps = function, stream, overlaps
        self._launches: dict[tuple[type, ...], Launch] = {}

    def __getitem__(self, grid: Sequence[int]) -> Launch:
        return partial(self._launch, grid)

    def _launch(self, grid: Sequence[int], *arguments: object, **constants: object) -> None:
        kinds = tuple(map(type, arguments))
        launch = self._launches.get(kinds)
        if launch is None:
            launch = self._launches[kinds] = self._made(arguments, tuple(constants))
        launch(grid, *arguments, **constants)

    def _made(self, arguments: Sequence[object], constants: Sequence[str]) -> Launch:
        """Return what launches with arguments of these types."""
        function, known = self._function, dict[_Key, tuple[object, ...]]()
        own, rest = function.params[: len(arguments)], function.params[len(arguments) :]
        assert all(each.is_constexpr for each in rest), "only constants are given by name"

        overlaps = self._overlaps

        def triton_launches(grid: Sequence[int], *values: object, **constants: object) -> object:
            options = {"launch_pdl": True} if overlaps and _may_overlap(values) else {}
            return function[grid](*values, **constants, **options)

        def first(key: _Key, grid: Sequence[int], values: Sequence[object], names: dict[str, object]) -> None:
            code: Any = triton_launches(grid, *values, **names)
            if len(known) >= _MOST_KNOWN:
                known.clear()
            behind = tuple(names.get(each.name, each.default) for each in rest)
            known[key] = (code.run, code.function, code.packed_metadata, behind)

        source = _source(own, arguments, constants)
        if source is None:
            return triton_launches
        names: dict[str, Any] = {
            "_known": known,
            "_first": first,
            "_as_triton": triton_launches,
            "_stream_of": self._stream,
        }
        exec(source, names)
        return names["launch"]


def _may_overlap(arguments: Sequence[object]) -> bool:
    """Return whether the GPU of a kernel's tensors launches kernels before the ones before them have ended."""
    devices = (each.device for each in arguments if isinstance(each, Tensor))
    return any(capability(device) >= _OVERLAPS_FROM for device in devices)


def _source(own: Sequence[Any], arguments: Sequence[object], constants: Sequence[str]) -> str | None:
    """Return the text of a function that launches with `arguments` of these types, of the parameters `own`. None where there is
    an argument of which nothing is known here. It is text since a loop over arguments takes as long as what it saves."""
    tensors, keyed = list[str](), list[str]()
    for parameter, value in zip(own, arguments, strict=True):
        match value:
            case Tensor():
                tensors.append(parameter.name)
            case bool():
                keyed.append(parameter.name)
            case int():
                # What a kernel is not specialised for is of 32 bits where it fits, else of 64.
                keyed.append(f"{parameter.name} >> 31" if parameter.do_not_specialize else parameter.name)
            case TensorDescriptor():
                keyed += [f"{parameter.name}.base.dtype", f"*{parameter.name}.block_shape"]
            case None | float():
                pass  # its type says all
            case _:
                return None
    if not tensors:
        return None
    names = [parameter.name for parameter in own]
    given = [f"_at_{name}" if name in tensors else name for name in names]
    key = ["_device", *(f"{name}.dtype" for name in tensors), *keyed, *constants]
    named = ", ".join(f"{name}={name}" for name in constants)
    return "\n    ".join(
        (
            f"def launch(_grid, {', '.join(names)}, *, {', '.join(constants)}):",
            *(f"_at_{name} = {name}.data_ptr()" for name in tensors),
            f"_device = {tensors[0]}.device",
            "_stream = _stream_of(_device)",
            f"if _stream is None or ({' | '.join(f'_at_{name}' for name in tensors)}) & 15:",
            f"    return _as_triton(_grid, {', '.join(names)}, {named})",
            f"_key = ({', '.join(key)},)",
            "_code = _known.get(_key)",
            "if _code is None:",
            f"    return _first(_key, _grid, ({', '.join(names)},), dict({named}))",
            "_run, _function, _metadata, _behind = _code",
            "_x, _y, _z = (*_grid, 1, 1)[:3]",
            # No metadata for hooks, and no hooks.
            f"_run(_x, _y, _z, _stream, _function, _metadata, None, None, None, {', '.join(given)}, *_behind)",
        )
    )


@triton.jit
def await_inputs():
    """Wait until all is written that was launched before, and let the kernel behind this one begin. What comes before the call
    may read what no kernel writes, such as weights."""
    if COMPILED:
        if cuda_capability_geq(9):
            gdc_wait()
            gdc_launch_dependents()


def launchable(*, overlaps: bool = False, **options: Any) -> Callable[[Callable[..., object]], Any]:
    """As `triton.jit`, for a kernel that is launched. `overlaps`: each of its programs calls `await_inputs` first, so that it may
    be launched while the kernel before it runs."""

    def wrap(function: Callable[..., object]) -> Any:
        jitted = triton.jit(function, **options)
        return jitted if INTERPRETED else Kernel(jitted, overlaps=overlaps)

    return wrap
