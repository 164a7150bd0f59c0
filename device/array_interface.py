"""Memory of a CUDA device in the form from which torch and cupy make an array of it without a copy."""

from typing import Any


class CudaBytes:
    """Bytes at an address, which nobody keeps alive by this."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }
