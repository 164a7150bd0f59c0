"""CUDA's Multi-Process Service (MPS): whether its daemon serves this process, and which part of a GPU's processors it may use.

With MPS the kernels of several processes run beside each other on one GPU; without it the GPU gives each process all of itself
in turn. CUDA looks for the daemon and for its share when a process first uses it, so both must be there before."""

import errno
import socket
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from core.errors import ConfigError

PIPE_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY"
THREAD_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_DEFAULT_DIRECTORY = "/tmp/nvidia-mps"
_ROUNDING = 1e-6
_START = "start it as the same user (nvidia-cuda-mps-control -d)"


def why_no_daemon(env: Mapping[str, str]) -> str:
    """Return why processes with this environment would do without MPS; empty where its daemon listens."""
    path = Path(env.get(PIPE_DIRECTORY) or _DEFAULT_DIRECTORY) / "control"
    # The daemon's socket is one of connections, so it refuses this one by its kind alone and never hears of it. Where the
    # daemon has ended, the socket is left behind, and the kernel says that nobody listens.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(str(path))
        except OSError as error:
            if error.errno == errno.EPROTOTYPE:
                return ""
            return f"no MPS daemon listens at {path} ({error.strerror}): {_START}, or say where it is with {PIPE_DIRECTORY}"
    return ""


def bound_processors(share: float, key: str, env: MutableMapping[str, str]) -> None:
    """Have CUDA use at most this share of its GPU's processors in the process of this environment, which has not used CUDA yet. 1
    means no bound. `key` is the configuration's. Raises ConfigError where there is no daemon to hold the process to that."""
    if share >= 1:
        env.pop(THREAD_PERCENTAGE, None)
        return
    if why := why_no_daemon(env):
        raise ConfigError(
            f"{key} bounds it to {share:.0%} of a shared card's processors, and {why}; or set {key} to 1"
        )
    env[THREAD_PERCENTAGE] = str(max(1, int(100 * share + _ROUNDING)))
