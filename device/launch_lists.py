"""Lists in pinned memory that kernels read what they do from. A list is filled again once the kernel that reads it is done; there
are as many as launches under way."""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from device.seam import ComputeDevice, Event, Region

Numbers = npt.NDArray[np.uint64]
_NUMBER_BYTES = np.dtype(np.uint64).itemsize


class LaunchLists:
    """For any thread."""

    def __init__(self, device: ComputeDevice, most_numbers: int) -> None:
        self._device, self._num_bytes = device, most_numbers * _NUMBER_BYTES
        self._lock = threading.Lock()
        self._lists: list[tuple[Event, Region]] = []

    @contextmanager
    def filled(self, numbers: Numbers, record: Callable[[], Event]) -> Generator[np.uint64]:
        """Give the address of a list of the numbers, row by row, for a launch on the stream of which `record` makes an event."""
        region = self._take()
        view = self._device.host_view(region.part(0, numbers.nbytes), write=True)
        np.frombuffer(view, np.uint64).reshape(numbers.shape)[:] = numbers
        try:
            yield np.uint64(region.address)
        finally:
            event = record()
            with self._lock:
                self._lists.append((event, region))

    def _take(self) -> Region:
        with self._lock:
            for number, (event, region) in enumerate(self._lists):
                if event.query():
                    del self._lists[number]
                    return region
        return self._device.pinned(self._num_bytes)
