"""A process that ends with the one that has started it."""

import ctypes
import os
import signal
from collections.abc import Mapping

_PARENT = "BATON_PARENT"
_PR_SET_PDEATHSIG = 1


def child_environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child that calls `die_with_parent`: this process's, and `more`."""
    return {**os.environ, **more, _PARENT: str(os.getpid())}


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that has started it ends.

    A child imports for seconds before it can say so, and its parent may be dead by then: a rank would look for the others where
    nobody is, for minutes. So the parent says who it is, and a child that has another one ends at once."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.environ.pop(_PARENT, str(os.getppid())) != str(os.getppid()):
        os._exit(1)
