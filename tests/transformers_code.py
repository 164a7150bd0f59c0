"""transformers' code of models, loaded without Triton, which it and torch would load, and which chooses its interpreter then.

Neither is asked for a kernel of Triton's by a test."""

import sys
from importlib import import_module

HIDDEN = "triton" not in sys.modules
if HIDDEN:
    sys.modules["triton"] = None  # type: ignore[assignment]
import_module("transformers.models.llama.modeling_llama")
if HIDDEN:
    del sys.modules["triton"]
