"""Where a step's inputs and results pass between the host and the device that computes.

Inputs go up packed, in one transfer. What a step has sampled stays on the device, where the next step reads it, and is copied to
the host meanwhile. On streams of their own (`StepMemory`) nobody waits for either. Otherwise (`HostSteps`) the host has it at
once.

Invariant: a step's memory is used again when the host has seen the end of that step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from device.seam import ComputeDevice, Copy, Event, Region

NUM_STEPS = 2
"""Steps that may be launched and not seen to be over: one computes, and one waits behind it."""
_ALIGNED = 16
_LEAST_BYTES = 1 << 18
_MOST_TENSORS = 1 << 10
"""Tensors that are kept at a time."""
_TOKEN = np.dtype(np.int64)
_TOKEN_BYTES = _TOKEN.itemsize

Placed = Callable[[], Tensor]
"""Gives an array on the device, once it is sent."""
Upload = Callable[[Sequence[np.ndarray]], list[Tensor]]


class Pack:
    """Arrays that go to the device together."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []
        self._tensors: list[Tensor] = []

    def add(self, array: np.ndarray) -> Placed:
        number = len(self._arrays)
        self._arrays.append(array)
        return lambda: self._tensors[number]

    def send(self, upload: Upload) -> None:
        self._tensors = upload(self._arrays) if self._arrays else []


class StepIO(Protocol):
    """One step's way to the device and back. For the compute thread."""

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Return the arrays on the device, where what is launched next may read and write them."""
        ...

    def known(self, places: Tensor) -> Tensor:
        """Return (N,) int64 tokens that the step before sampled, by their `place`."""
        ...

    def place(self) -> int | None:
        """Return where the next step finds the token that this one sampled in its first row; those of the other rows follow. None
        where the host has them by then."""
        ...

    def give(self, results: Sequence[Tensor]) -> None:
        """Take what the step has sampled: tokens (N,) int64 first. Called at most once."""
        ...

    def end(self) -> Event:
        """Return what says when all that was launched is over, and `read` has the results."""
        ...

    def read(self) -> list[Any]:
        """Return what `give` got, each as a list. The step is over."""
        ...


class Steps(Protocol):
    """The steps of one rank. For its compute thread."""

    def begin(self) -> StepIO: ...
    def mark(self) -> Event:
        """Return what says when all that was launched is over, of a step that was not launched to its end, too."""
        ...

    def close(self) -> None:
        """All steps are over."""
        ...


class _Done:
    """The `Event` of work that the host has waited for."""

    def query(self) -> bool:
        return True


_DONE = _Done()


class HostSteps:
    """`Steps` that wait for the device wherever the host reads from it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> StepIO:
        return _HostStep(self._device)

    def mark(self) -> Event:
        return _DONE

    def close(self) -> None:
        """Do nothing."""


class _HostStep:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._results: Sequence[Tensor] = ()

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        arrived = [torch.from_numpy(array) for array in arrays]
        return arrived if self._device.type == "cpu" else [each.to(self._device) for each in arrived]

    def known(self, places: Tensor) -> Tensor:
        raise AssertionError("the host knows all tokens")

    def place(self) -> int | None:
        return None

    def give(self, results: Sequence[Tensor]) -> None:
        self._results = results

    def end(self) -> Event:
        return _DONE

    def read(self) -> list[Any]:
        return [result.tolist() for result in self._results]


class StepMemory:
    """`Steps` in a device's memory, with a stream for what goes up and one for what comes down."""

    def __init__(self, device: ComputeDevice, torch_device: torch.device, max_rows: int) -> None:
        """`max_rows`: the most tokens that a step samples."""
        self.device = device
        self.going_up, self.coming_down = device.stream("step inputs"), device.stream("step results")
        self._torch_device = torch_device
        self._sampled = _Pair.of(device, NUM_STEPS * max_rows * _TOKEN_BYTES)
        """The tokens of the last steps, side by side."""
        self._parts = [_DeviceStep(self, self._sampled, number, max_rows) for number in range(NUM_STEPS)]
        self._next = 0
        self._tensors: dict[tuple[int, np.dtype[Any], tuple[int, ...]], Tensor] = {}

    def begin(self) -> StepIO:
        part = self._parts[self._next]
        self._next = (self._next + 1) % NUM_STEPS
        part.begin()
        return part

    def mark(self) -> Event:
        # What went up was waited for by the compute stream at once.
        self.coming_down.wait(self.device.compute.record())
        return self.coming_down.record()

    def tensor(self, region: Region, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Tensor:
        """Return a region of the device's memory, for what is launched on its compute stream. Steps that are alike have theirs at
        the same places, so it is kept: torch asks the driver about each that it takes over."""
        key = (region.address, dtype, shape)
        if (kept := self._tensors.get(key)) is None:
            if len(self._tensors) == _MOST_TENSORS:
                self._tensors.clear()
            flat = torch.as_tensor(self.device.array(region), device=self._torch_device)
            kept = flat.view(torch.from_numpy(np.empty(0, dtype)).dtype).view(shape)
            self._tensors[key] = kept
        return kept

    def close(self) -> None:
        """All steps are over."""
        for stream in (self.going_up, self.coming_down):
            stream.close()
        self._tensors.clear()
        for part in self._parts:
            part.close()
        self._sampled.free(self.device)


@dataclass(slots=True)
class _Pair:
    """As much memory of the device as of the host, pinned, between which bytes are copied."""

    host: Region
    device: Region
    used: int = 0

    @classmethod
    def of(cls, device: ComputeDevice, num_bytes: int) -> "_Pair":
        there = device.allocate(num_bytes)  # first, since it is what may find no memory
        return cls(device.pinned(num_bytes), there)

    def take(self, num_bytes: int) -> "_Pair | None":
        """Return the next unused bytes, aligned for any type, or None where there are not so many."""
        if self.used + num_bytes > self.host.num_bytes:
            return None
        start, self.used = self.used, self.used + _aligned(num_bytes)
        return _Pair(self.host.part(start, num_bytes), self.device.part(start, num_bytes))

    def free(self, device: ComputeDevice) -> None:
        device.free(self.host)
        device.free(self.device)


class _DeviceStep:
    def __init__(self, memory: StepMemory, sampled: _Pair, number: int, max_rows: int) -> None:
        self._memory, self._device, self._all_sampled = memory, memory.device, sampled
        self._first_place = number * max_rows
        size = max_rows * _TOKEN_BYTES
        self._sampled = _Pair(
            sampled.host.part(number * size, size), sampled.device.part(number * size, size)
        )
        self._chunks: list[_Pair] = []
        self._results: list[tuple[_Pair, np.dtype[Any], tuple[int, ...]]] = []
        """Where each result is copied, and what it is."""

    def begin(self) -> None:
        self._results = []
        for chunk in self._chunks:
            chunk.used = 0

    def close(self) -> None:
        for chunk in self._chunks:
            chunk.free(self._device)

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        ends = list(accumulate(_aligned(array.nbytes) for array in arrays))
        pair = self._take(ends[-1])
        view = self._device.host_view(pair.host, write=True)
        out: list[Tensor] = []
        for array, end in zip(arrays, ends, strict=True):
            at = end - _aligned(array.nbytes)
            view[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            out.append(self._memory.tensor(pair.device.part(at, array.nbytes), array.dtype, array.shape))
        self._memory.going_up.copy([Copy(pair.device, pair.host)])
        self._device.compute.wait(self._memory.going_up.record())
        self._device.compute.uses([], [pair.device])
        return out

    def known(self, places: Tensor) -> Tensor:
        region = self._all_sampled.device
        self._device.compute.uses([region], [])
        return self._memory.tensor(region, _TOKEN, (-1,)).index_select(0, places)

    def place(self) -> int | None:
        return self._first_place

    def give(self, results: Sequence[Tensor]) -> None:
        tokens, *more = results
        num_bytes = tokens.nbytes
        pairs = [_Pair(self._sampled.host.part(0, num_bytes), self._sampled.device.part(0, num_bytes))]
        pairs += [self._take(result.nbytes) for result in more]
        for pair, result in zip(pairs, results, strict=True):
            dtype = np.empty(0, str(result.dtype).removeprefix("torch.")).dtype
            self._device.compute.uses([], [pair.device])
            shape = tuple(result.shape)
            self._memory.tensor(pair.device, dtype, shape).copy_(result)
            self._results.append((pair, dtype, shape))

    def end(self) -> Event:
        stream = self._memory.coming_down
        stream.wait(self._device.compute.record())
        stream.copy([Copy(pair.host, pair.device) for pair, _, _ in self._results])
        return stream.record()

    def read(self) -> list[Any]:
        return [
            np.frombuffer(self._device.host_view(pair.host, write=False), dtype).reshape(shape).tolist()
            for pair, dtype, shape in self._results
        ]

    def _take(self, num_bytes: int) -> _Pair:
        """Return memory that is this step's until its end. What a step needs once is kept for those after it."""
        for chunk in self._chunks:
            if (pair := chunk.take(num_bytes)) is not None:
                return pair
        # Allocating holds the device up. It is twice what is needed, so that it is done a few times in all.
        self._chunks.append(_Pair.of(self._device, max(_LEAST_BYTES, 2 * num_bytes)))
        return self._take(num_bytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED
