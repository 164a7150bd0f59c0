"""The host's memory by address."""

import ctypes
from typing import Any

import numpy as np

_WRITABLE = 0x200
_view: Any = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype, _view.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


def view_of(address: int, num_bytes: int) -> memoryview:
    """Bytes at an address, for as long as whoever allocated them keeps them."""
    # An array of ctypes would be of a type of its own for each size, which takes longer to make than what is copied.
    return _view(address, num_bytes, _WRITABLE) if num_bytes else memoryview(b"")


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data) if len(view) else 0
