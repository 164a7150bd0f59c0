"""Baton: a disaggregated LLM inference cluster. `LLM` is for offline batches in Python; `baton serve` is the cluster."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from core.config import ClusterConfig
from core.types import SamplingParams

if TYPE_CHECKING:
    from baton.llm import LLM, Completion

__all__ = ["LLM", "ClusterConfig", "Completion", "SamplingParams"]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Import the engine, with PyTorch, only when it is asked for: commands that compute nothing begin seconds sooner."""
    if name in ("LLM", "Completion"):
        return getattr(import_module("baton.llm"), name)
    raise AttributeError(f"module 'baton' has no attribute {name!r}")
