"""How far the replay of a captured step has come, layer by layer, as the host sees it.

An event that a capture records is one for all its replays: the host could not tell which of them it speaks of, and would take a
layer for written that the replay before has written. So each replay has a number, which it writes to the host's memory behind a
layer. Numbers grow, and replays follow each other on one stream: a number that is there says that this replay has come so far.

Invariant: a number that the host gives to a replay is in no mark before that replay writes it there."""

from collections.abc import Sequence

import numpy as np
import torch

from device.seam import ComputeDevice, Event

_MOST_MARKS = 16
"""Marks of a replay. Each is a kernel, and layers in between are taken for written with the next that is marked."""


class LayerMarks:
    """The marks of one rank's captures. For its compute thread."""

    def __init__(self, device: ComputeDevice, torch_device: torch.device, layers: Sequence[int]) -> None:
        """`layers` are those of the rank's pool, by their numbers in the model's KV. `torch_device`: torch's name of `device`."""
        self._device = device
        self._first, self._per_mark = layers[0], -(-len(layers) // _MOST_MARKS)
        region = device.pinned(_INT64.itemsize * -(-len(layers) // self._per_mark))
        self._seen = np.frombuffer(device.host_view(region, write=False), _INT64)
        flat = torch.as_tensor(device.array(region), device=torch_device).view(torch.int64)
        self._marks = flat.split(1)
        self._last = len(layers) - 1
        self._number = torch.zeros(1, dtype=torch.int64, device=torch_device)
        self._num_launched = 0

    def begin(self) -> None:
        """Launch, as the first of a capture's launches, what gives the replay its number."""
        self._number += 1

    def written(self, layer: int) -> None:
        """Launch what marks a layer as written, if it is marked."""
        index = layer - self._first
        if index == self._last or not (index + 1) % self._per_mark:
            # An operation on two tensors is a kernel, and a copy is not always one.
            torch.add(self._number, 0, out=self._marks[index // self._per_mark])

    def captured(self) -> None:
        """Take note of the numbers that launches for captures have used up. Waits for the device."""
        self._num_launched = int(self._number.item())

    def launches(self) -> int:
        """Return the number of the replay that is launched next."""
        self._num_launched += 1
        return self._num_launched

    def events(self, number: int) -> list[Event]:
        """Return what says of each layer of the pool that the replay of this number, launched last, has written it. Layers that
        share a mark share that."""
        end = self._device.compute.record()
        marks = [_Written(self._seen, place, number, end) for place in range(len(self._seen))]
        return [marks[index // self._per_mark] for index in range(self._last + 1)]


_INT64 = np.dtype(np.int64)


class _Written:
    def __init__(self, seen: np.ndarray, place: int, number: int, end: Event) -> None:
        """`end` is behind the whole replay."""
        self._seen, self._place, self._number, self._end = seen, place, number, end

    def query(self) -> bool:
        # The end is asked first, since it raises for a replay that has failed.
        return self._end.query() or bool(self._seen[self._place] >= self._number)
