"""Baton: a disaggregated LLM inference cluster. `LLM` is for offline batches in Python; `baton serve` is the cluster."""

from baton.llm import LLM, Completion
from core.config import ClusterConfig
from core.types import SamplingParams

__all__ = ["LLM", "ClusterConfig", "Completion", "SamplingParams"]
__version__ = "0.1.0"
