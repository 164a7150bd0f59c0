"""Baton: a disaggregated LLM inference cluster. `LLM` is for offline batches in Python; `baton serve` is the cluster."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.llm import LLM, Completion
    from core.config.cluster_config import ClusterConfig
    from core.types import SamplingParams

__all__ = ["LLM", "ClusterConfig", "Completion", "SamplingParams"]
__version__ = "0.2.0"


_MODULES = {
    "LLM": "baton.llm",
    "Completion": "baton.llm",
    "ClusterConfig": "core.config.cluster_config",
    "SamplingParams": "core.types",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for, and nothing else: the engine takes seconds, and the configuration a third of one."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'baton' has no attribute {name!r}")
