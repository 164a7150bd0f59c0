"""What stays of a rank while its instance sleeps: the loaded model, in host memory, or nothing.

A model that lies on a device moves to pinned host memory and back. Its tensors stay the objects that they are: their storages
are emptied, and filled again, so that whatever refers to them need not know."""

import gc
import types
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor, UntypedStorage

from core.start_timer import StartTimer

M = TypeVar("M")
_OPAQUE = (type, types.ModuleType, types.CodeType, str, bytes, int, float, bool)


class KeptModel(Generic[M]):
    """The model of one rank in this process, over any number of sleeps. For one call at a time."""

    def __init__(self) -> None:
        self._model: M | None = None
        self._moved: list[tuple[UntypedStorage, Tensor]] = []

    @property
    def is_kept(self) -> bool:
        return self._model is not None

    def model(self, load: Callable[[], M], timer: StartTimer) -> M:
        """Return the model, ready to compute: the one that was kept, or what `load` returns. `timer` hears of `copying`."""
        if self._model is None:
            self._model = load()
        elif self._moved:
            with timer.within("copying"):
                self._move_back()
        return self._model

    def rest(self, device: torch.device) -> None:
        """Move all that the model has on `device` to host memory, and give that memory back. Nothing may compute with the model
        until `model` is called. On a CPU the model stays where it is."""
        if self._model is not None and device.type != "cpu":
            self.move(device)

    def move(self, device: torch.device) -> None:
        """As `rest`, whatever the device."""
        pinned = device.type == "cuda"
        for storage in storages_of(self._model, device):
            there = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            there.copy_(_bytes_of(storage), non_blocking=pinned)
            self._moved.append((storage, there))
        _settle(device)
        for storage, _ in self._moved:
            storage.resize_(0)

    def forget(self) -> None:
        """Keep nothing."""
        self._model = None
        self._moved.clear()

    def _move_back(self) -> None:
        for storage, there in self._moved:
            storage.resize_(there.nbytes)
            _bytes_of(storage).copy_(there, non_blocking=there.is_pinned())
        _settle(self._moved[0][0].device)
        self._moved.clear()


def storages_of(whole: object, device: torch.device) -> Iterator[UntypedStorage]:
    """Yield each storage on `device` that `whole` leads to and whose size can be changed, once."""
    found = set[int]()
    for tensor in tensors_of(whole):
        storage = tensor.untyped_storage()
        if tensor.device.type == device.type and storage.data_ptr() not in found and storage.resizable():
            found.add(storage.data_ptr())
            yield storage


def tensors_of(whole: object) -> Iterator[Tensor]:
    """Yield each tensor that `whole` leads to, once."""
    seen, ahead = {id(whole)}, [whole]
    while ahead:
        one = ahead.pop()
        if isinstance(one, Tensor):
            yield one
            continue
        for part in _parts_of(one):
            if id(part) not in seen and not isinstance(part, _OPAQUE):
                seen.add(id(part))
                ahead.append(part)


def _parts_of(one: object) -> list[object]:
    """Return what an object holds. A function leads to what it has closed over, and not to its module."""
    if isinstance(one, types.FunctionType):
        return [*(one.__closure__ or ()), one.__defaults__]
    return gc.get_referents(one)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _settle(device: torch.device) -> None:
    """Wait until the copies to and from a device are over."""
    if device.type == "cuda":
        # The copies read memory that is given back next, or written by the first step.
        torch.cuda.synchronize(device)
