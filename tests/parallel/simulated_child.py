"""What a rank, and the memory server of a rank, do whose pool lies on a simulated device. What the device finds unordered they write
into a folder. At SIGUSR1 the device has no memory for the third allocation from then on."""

import ctypes
import os
import signal
import socket
from pathlib import Path

import torch

from cluster.instance.remote_memory.memory_server import serve_memory
from core.config.cluster_config import TransferConfig
from device.simulated import SimulatedDevice
from engine.execution.graphs.graph_capture import again, cuda_capture
from engine.ranks.rank_process import serve_instance
from kernels.ops import Ops
from models import registry


class _Noted(list[str]):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def append(self, violation: str) -> None:
        super().append(violation)
        with self._path.open("a") as file:
            file.write(f"{violation}\n")


class _Devices:
    """A device.seam.DeviceOf."""

    def __init__(self, kind: str, notes: str) -> None:
        self._path = Path(notes) / f"violations-{kind}-{os.getpid()}"

    def __call__(self, name: str) -> SimulatedDevice:
        device = SimulatedDevice(seed=os.getpid())
        signal.signal(signal.SIGUSR1, lambda *_: device.run_out((2,)))
        device.violations = _Noted(self._path)
        return device


def simulated_rank(sock: socket.socket, notes: str) -> int:
    """With TRITON_INTERPRET=1 it computes by Triton's kernels, and repeats the launches that it captures."""
    _end_with_the_instance()
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if is_interpreted:
        _compute_by_triton()
    return serve_instance(
        sock, _Devices("rank", notes), (lambda _: again) if is_interpreted else cuda_capture
    )


def simulated_memory(sock: socket.socket, notes: str, transfer: TransferConfig, key: bytes) -> int:
    _end_with_the_instance()
    serve_memory(sock, transfer, key, _Devices("memory", notes))
    return 0


def _compute_by_triton() -> None:
    from benchmarks.gpu.interpreter import replace_once
    from kernels.triton.ops import invariant_ops_split_at, triton_ops

    def ops_of(device: torch.device, *_: object, deterministic: bool) -> Ops:
        return invariant_ops_split_at(device, 16) if deterministic else triton_ops(device)

    replace_once()
    registry.select_ops = ops_of


def _end_with_the_instance() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
