"""Exit with 0 if the installed torch is a build for CUDA, which needs what `locks/cuda.txt` has, and with 1 otherwise."""

import importlib.metadata
import re
import sys

sys.exit(not any(re.match("(nvidia|cuda)-", one) for one in importlib.metadata.requires("torch") or []))
