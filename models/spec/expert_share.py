"""Which part of a layer's routed experts a token uses, by any config.json that transformers reads."""

from collections.abc import Callable
from typing import Any, Final

EXPERT_KEYS: Final = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
_CHOSEN_KEYS: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def expert_share(get: Callable[[str], Any]) -> float:
    """Return the share; 0 where the configuration names no experts. `get` returns what it says under a name, or None."""
    num = said(get, EXPERT_KEYS)
    return min(1.0, max(1, said(get, _CHOSEN_KEYS)) / num) if num else 0.0


def said(get: Callable[[str], Any], names: tuple[str, ...]) -> int:
    """Return the first of these numbers, or the first layer's where a list has one of each layer; 0 where there is none."""
    for name in names:
        value = get(name)
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, int) and value:
            return value
    return 0
