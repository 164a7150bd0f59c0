"""Says in Baton's words that torch has found no memory, when what was computed so far takes none any more."""

from collections.abc import Callable
from typing import TypeVar

import torch

from core.errors import OutOfMemory

P = TypeVar("P")
T = TypeVar("T")


def freeing(do: Callable[[P], T], given: P) -> T:
    """Return `do(given)`. Raises OutOfMemory where a device has no memory for it; torch's allocator then keeps none for later."""
    try:
        return do(given)
    except (torch.cuda.OutOfMemoryError, OutOfMemory) as error:
        why = str(error)
    # The error is gone by now, and with it the frames in which the step's tensors were.
    torch.cuda.empty_cache()
    raise OutOfMemory(why)
