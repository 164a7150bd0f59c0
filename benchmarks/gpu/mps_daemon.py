"""CUDA's Multi-Process Service for as long as a row needs it."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Generator
from tempfile import TemporaryDirectory

from core.errors import ConfigError
from device.mps import PIPE_DIRECTORY, why_no_daemon

_PROGRAM = "nvidia-cuda-mps-control"
_PATIENCE_S = 10.0


@contextlib.contextmanager
def mps_daemon() -> Generator[None]:
    """Start a daemon of this environment, unless one listens already, and end it afterwards. Raises ConfigError where there is no
    such program, and what it fails with."""
    if not why_no_daemon(os.environ):
        yield
        return
    if shutil.which(_PROGRAM) is None:
        raise ConfigError(f"{_PROGRAM} is not installed: processors cannot be bounded here")
    before = os.environ.copy()
    with TemporaryDirectory(prefix="baton-mps-") as folder:
        os.environ |= {PIPE_DIRECTORY: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        try:
            subprocess.run([_PROGRAM, "-d"], check=True, timeout=_PATIENCE_S)
            yield
        finally:
            subprocess.run([_PROGRAM], input="quit -t 3\n", text=True, check=False, timeout=_PATIENCE_S)
            os.environ.clear()
            os.environ.update(before)
