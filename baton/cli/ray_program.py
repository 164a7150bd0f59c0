"""Runs Ray's own command line for the commands that need it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from core.errors import ConfigError


def run_ray(*args: str, provider: str = "", quiet: bool = False, check: bool = True) -> int:
    """Run Ray's own command line, with its output passed on. Returns its exit status; raises ConfigError for a bad one if
    `check`."""
    program = shutil.which("ray", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if program is None:
        raise ConfigError("the program `ray` is not on the PATH")
    # With Ray's second autoscaler only one of several machines of a local provider joins.
    environment = {"RAY_UP_enable_autoscaler_v2": "0"} if provider == "local" else {}
    output = subprocess.DEVNULL if quiet else None
    code = subprocess.run(
        [program, *args], env={**os.environ, **environment}, stdout=output, stderr=output, check=False
    ).returncode
    if code and check:
        raise ConfigError(f"`ray {' '.join(args)}` has failed (exit status {code}); its own words are above")
    return code
