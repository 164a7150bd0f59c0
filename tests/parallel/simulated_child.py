"""A rank, or the memory server of a rank, whose pool lies on a simulated device: `python -m tests.parallel.simulated_child FD KIND FOLDER
[TRANSFER KEY]`. What the device finds unordered it writes into FOLDER. A rank with TRITON_INTERPRET=1 computes by Triton's kernels,
and repeats the launches that it captures. At SIGUSR1 the device has no memory for the third allocation from then on."""

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path

import torch

from device.simulated import SimulatedDevice
from kernels.ops import Ops


class _Noted(list[str]):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def append(self, violation: str) -> None:
        super().append(violation)
        with self._path.open("a") as file:
            file.write(f"{violation}\n")


def simulated(name: str) -> SimulatedDevice:
    device = SimulatedDevice(seed=os.getpid())
    signal.signal(signal.SIGUSR1, lambda *_: device.run_out((2,)))
    device.violations = _Noted(Path(sys.argv[3]) / f"violations-{sys.argv[2]}-{os.getpid()}")
    return device


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    code = 0
    if sys.argv[2] == "rank":
        from engine.execution.graph_capture import again, cuda_capture
        from engine.ranks.rank_process import serve_instance

        is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if is_interpreted:
            from benchmarks.gpu.interpreter import replace_once
            from kernels.triton.ops import invariant_ops_split_at, triton_ops
            from models import registry

            def ops_of(device: torch.device, kernels: str, deterministic: bool, *_: object) -> Ops:
                return invariant_ops_split_at(device, 16) if deterministic else triton_ops(device)

            replace_once()
            registry.select_ops = ops_of
        code = serve_instance(sock, simulated, (lambda _: again) if is_interpreted else cuda_capture)
    else:
        from cluster.instance.remote_memory.memory_server import serve_memory
        from core.config import TransferConfig

        transfer = TransferConfig.model_validate_json(sys.argv[4])
        serve_memory(sock, transfer, sys.argv[5].encode(), simulated)
    os._exit(code)
