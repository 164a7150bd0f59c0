"""A memory server as a child process that says it is on another host: `python -m tests.parallel.memory_server_child FD HOST TRANSFER KEY`."""

import ctypes
import signal
import socket
import sys

from kvtransfer.transport import shm

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    shm.host_id = lambda: sys.argv[2]
    from cluster.instance.remote_memory.memory_server import serve_memory
    from core.config import TransferConfig

    transfer = TransferConfig.model_validate_json(sys.argv[3])
    serve_memory(socket.socket(fileno=int(sys.argv[1])), transfer, sys.argv[4].encode())
