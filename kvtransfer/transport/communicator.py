"""One end of a communicator of torch.distributed between two processes.

What it moves lies in two buffers of its own on the pool's device. It is issued on a stream of its own, never on the one that
models compute on, and it has moved when the host has seen an event on that stream. A buffer is touched by others only then."""

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgpack
import torch
import torch.distributed as dist

from core.errors import DeviceError, TransferError
from device.port import PoolMemory
from device.seam import DeviceStream, Region
from kvtransfer.transport.pull import Exchange

BUFFER_BYTES = 4 << 20
NUM_BUFFERS = 2
_PATIENCE_S = 30.0
_MAX_BLOCKS = 4
"""Thread blocks of a GPU that one communicator takes, so that those of many writers find room beside each other and the model."""


class Communicator:
    """Rank 0 receives and rank 1 sends. For one thread at a time, but `abort`, which is for any."""

    def __init__(
        self, backend: str, make_group: "MakeGroup", pool: PoolMemory, exchange: Exchange, rank: int
    ) -> None:
        """Returns after a first byte has gone through it. Raises TransferError."""
        device, store = pool.device, ChannelStore(exchange)
        self._pool, self._rank = pool, rank
        self._stream = device.stream(f"{backend} communicator")
        self.buffers: list[Region] = []
        self._tensors: list[torch.Tensor] = []
        self._works: dict[int, Any] = {}
        self._group: Any = None
        try:
            for _ in range(NUM_BUFFERS):
                self.buffers.append(device.allocate(BUFFER_BYTES))
                self._tensors.append(torch.as_tensor(device.array(self.buffers[-1])))
            self._group = make_group(store, rank)
            self.start(0, 1)
            self.finish(0)
            store.set(f"ready{rank}", b"1")
            store.get(f"ready{1 - rank}")
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError | ValueError | DeviceError):
                raise TransferError(f"no {backend} communicator: {error}") from error
            raise

    def start(self, number: int, num_bytes: int) -> None:
        """Begin to send, or to receive, the first bytes of a buffer that nothing else touches. Raises TransferError."""
        touched = [self.buffers[number].part(0, num_bytes)]
        piece = self._tensors[number][:num_bytes]
        try:
            with _on(self._stream, piece):
                if self._rank:
                    self._stream.uses(touched, [])
                    self._works[number] = self._group.send([piece], 0, number)
                else:
                    self._stream.uses([], touched)
                    self._works[number] = self._group.recv([piece], 1, number)
        except RuntimeError as error:
            raise _failed(error) from error

    def finish(self, number: int) -> None:
        """Return when what was begun with a buffer is over. Raises TransferError when the peer does not do its part."""
        work = self._works.pop(number)
        try:
            with _on(self._stream, self._tensors[number]):
                work.wait(timedelta(seconds=_PATIENCE_S))  # of NCCL: the stream waits, the host does not
            self._pool.poller.wait([self._stream.record()], _PATIENCE_S)
        except (RuntimeError, DeviceError) as error:
            raise _failed(error) from error

    def abort(self) -> None:
        """Have what is under way end, whatever the peer does."""
        if (group := self._group) is not None:
            with contextlib.suppress(RuntimeError):  # a broken communicator may refuse
                group.abort()

    def close(self) -> None:
        """Give back the buffers, when nothing touches them any more. Only `abort` may still be called, or under way."""
        self.abort()
        # What is under way keeps the memory that it writes for as long as somebody refers to it.
        self._works.clear()
        self._tensors.clear()
        self._group = None
        self._stream.close()
        for buffer in self.buffers:
            self._pool.device.free(buffer)


class ChannelStore(dist.Store):  # pyright: ignore[reportPrivateImportUsage]
    """The store in which two ranks find each other while they connect. What one sets is sent to the other, which waits for it."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._exchange.send(msgpack.packb([key, self._values[key]]))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        while key not in self._values:
            message: Any = msgpack.unpackb(self._exchange.recv())
            self._values[message[0]] = message[1]
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: the exchange has its own timeout."""


MakeGroup = Callable[[ChannelStore, int], Any]
"""(store, rank) -> torch's group of the two processes."""


def nccl_group(store: ChannelStore, rank: int) -> Any:
    """Return a group of two processes with a GPU each."""
    # A lost peer ends a connection. As it is shipped, torch's watchdog would end this process, and could abort a communicator
    # behind our back, which ends a receive without its bytes. Nothing else in this process uses NCCL.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    options = dist.ProcessGroupNCCL.Options()
    options.config.blocking = 0
    options.config.max_ctas = _MAX_BLOCKS
    options._timeout = timedelta(seconds=_PATIENCE_S)  # pyright: ignore[reportPrivateUsage]
    return dist.ProcessGroupNCCL(store, rank, 2, options)


def _on(stream: DeviceStream, tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Have torch use the stream, on a GPU. Elsewhere torch has none."""
    if not tensor.is_cuda:
        return contextlib.nullcontext()
    handle: int = stream.handle  # type: ignore[attr-defined]
    return torch.cuda.stream(torch.cuda.ExternalStream(handle, tensor.device))


def _failed(error: Exception) -> TransferError:
    return TransferError(f"the other side of the communicator failed: {error}")
