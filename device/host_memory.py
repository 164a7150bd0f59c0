"""The host's memory by address."""

import ctypes

import numpy as np


def view_of(address: int, num_bytes: int) -> memoryview:
    """Bytes at an address, for as long as whoever allocated them keeps them."""
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data) if len(view) else 0


def move(destination: int, source: int, num_bytes: int) -> None:
    """Other threads run meanwhile."""
    ctypes.memmove(destination, source, num_bytes)
