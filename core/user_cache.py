"""Where a user's processes keep what they can make again."""

import os
from pathlib import Path


def user_cache() -> Path:
    """Return Baton's folder in the user's cache, which may not be there. `kernels/cpu/build.py`, which setup.py runs alone, says
    the same."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"
