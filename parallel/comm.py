"""Collectives among the ranks of one axis: gloo between processes on CPUs, NCCL between GPUs.

Every rank of a group makes the same calls in the same order. A call ends in ReplicaLost when a peer has gone or does not do its
part within the deadline; after that the communicator is of no use. To end a call at once, end its process: the instance that has
started the ranks does so when one of them fails."""

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from core.errors import ConfigError, ReplicaLost

Backend = Literal["gloo", "nccl"]
TIMEOUT_S = 60.0
_MAX_SENT = 64


class Comm(Protocol):
    """`rank` of `size` in this group. Tensors are on the group's device; what is sent must not change until the call returns."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        ...

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return every rank's `x`, of one shape and dtype, in the order of the ranks."""
        ...

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """(sum(sent), ...) -> (sum(received), ...): rows to each rank in turn, rows from each rank in turn. Any may be none."""
        ...

    def send(self, x: Tensor, to: int) -> None:
        """Send `x`, which must not change any more. Waits for the receiver only when 64 tensors are on their way."""
        ...

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor: ...
    def close(self) -> None:
        """Waits until everything that was sent has been received."""
        ...


class OneRank:
    """A group of one."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return [x]

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return x

    def send(self, x: Tensor, to: int) -> None:
        raise AssertionError("nobody else is here")

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        raise AssertionError("nobody else is here")

    def close(self) -> None:
        pass


class GroupComm:
    """A group over a torch process group of its own, which no global state knows."""

    def __init__(self, group: Any, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._group, self._device = group, device
        self._sent: deque[tuple[Any, Tensor]] = deque()
        """Sends that may not have ended: gloo's end when the receiver has asked for them."""

    def all_reduce(self, x: Tensor) -> Tensor:
        self._wait(lambda: self._group.allreduce([x]))
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        out = [torch.empty_like(x) for _ in range(self.size)]
        self._wait(lambda: self._group.allgather([out], [x.contiguous()]))
        return out

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        width = x.shape[1:].numel() * x.dtype.itemsize
        out = torch.empty((sum(received), *x.shape[1:]), dtype=x.dtype, device=x.device)
        to, source = [rows * width for rows in sent], [rows * width for rows in received]
        self._wait(lambda: self._group.alltoall_base(_bytes(out), _bytes(x), source, to))
        return out

    def send(self, x: Tensor, to: int) -> None:
        while len(self._sent) >= _MAX_SENT:
            work, _ = self._sent.popleft()
            self._wait(lambda work=work: work)
        x = _bytes(x)
        self._sent.append((self._group.send([x], to, 0), x))

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
        x = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        self._wait(lambda: self._group.recv([_bytes(x)], source, 0))
        return x

    def close(self) -> None:
        while self._sent:
            work, _ = self._sent.popleft()
            self._wait(lambda work=work: work)
        del self._group

    def _wait(self, start: Any) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise ReplicaLost(f"a rank of the group is gone or stuck: {error}") from error


def _bytes(x: Tensor) -> Tensor:
    """Return (n,) uint8 of the same memory: whatever the dtype, it is only moved."""
    return x.contiguous().view(-1).view(torch.uint8)


def connect(
    store: Any,
    name: str,
    ranks: Sequence[int],
    rank: int,
    *,
    backend: Backend,
    device: torch.device,
    hostname: str = "127.0.0.1",
    timeout_s: float = TIMEOUT_S,
) -> Comm:
    """Connect the group `name` of the given ranks, of which `rank` is this one. All of them must call. Raises ReplicaLost,
    ConfigError.

    `store` is where they find each other (a torch.distributed Store); each name may be used once in its life."""
    if len(ranks) == 1:
        return OneRank()
    index, timeout = list(ranks).index(rank), timedelta(seconds=timeout_s)
    prefix = dist.PrefixStore(f"{name}-{ranks[0]}", store)  # pyright: ignore[reportPrivateImportUsage]
    try:
        group = (
            _gloo(prefix, index, len(ranks), hostname, timeout)
            if backend == "gloo"
            else _nccl(prefix, index, len(ranks), timeout)
        )
        comm = GroupComm(group, index, len(ranks), device)
        comm.all_reduce(torch.zeros(1, device=device))
    except RuntimeError as error:
        raise ReplicaLost(f"ranks {list(ranks)} did not form a {backend} group: {error}") from error
    return comm


def _gloo(store: Any, index: int, size: int, hostname: str, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=hostname)]
    options._timeout = timeout
    return gloo(store, index, size, options)


def _nccl(store: Any, index: int, size: int, timeout: timedelta) -> Any:
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise ConfigError("ranks on GPUs need NVIDIA devices and a CUDA build of torch")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout  # pyright: ignore[reportPrivateUsage]
    return dist.ProcessGroupNCCL(store, index, size, options)
