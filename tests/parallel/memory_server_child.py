"""What a memory server does that says it is on another host."""

import ctypes
import signal
import socket

from cluster.instance.remote_memory.memory_server import serve_memory
from core.config.cluster_config import TransferConfig
from kvtransfer.transport import shm


def serve_as(sock: socket.socket, host: str, transfer: TransferConfig, key: bytes) -> int:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    shm.host_id = lambda: host
    serve_memory(sock, transfer, key)
    return 0
