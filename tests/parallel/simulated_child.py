"""A rank, or the memory server of a rank, whose pool lies on a simulated device: `python -m tests.parallel.simulated_child FD KIND FOLDER
[TRANSFER KEY]`. What the device finds unordered it writes into FOLDER."""

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path

from device.simulated import SimulatedDevice


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
    device.violations = _Noted(Path(sys.argv[3]) / f"violations-{sys.argv[2]}-{os.getpid()}")
    return device


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    code = 0
    if sys.argv[2] == "rank":
        from engine.ranks.rank_process import serve_instance

        code = serve_instance(sock, simulated)
    else:
        from cluster.instance.remote_memory.memory_server import serve_memory
        from core.config import TransferConfig

        transfer = TransferConfig.model_validate_json(sys.argv[4])
        serve_memory(sock, transfer, sys.argv[5].encode(), simulated)
    os._exit(code)
