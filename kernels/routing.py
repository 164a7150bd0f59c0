"""How a router's scores become a choice of experts: everything that differs between models, as data."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Mixtral, Qwen and gpt-oss renormalise a softmax; DeepSeek-V2 and V3 first choose groups of experts
    (arXiv:2405.04434, section 2.1; arXiv:2412.19437, section 2.1.2)."""

    top_k: int
    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    renormalise: bool = True
    """Whether the chosen experts' weights sum to `scale`. Otherwise they are their scores times `scale`."""
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    """Only experts of this many groups may be chosen."""
    group_best: int = 1
    """A group's score is the sum of so many of its best experts' scores."""
