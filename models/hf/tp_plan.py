"""The plans by which transformers' models are cut over tensor-parallel ranks (`base_model_tp_plan` of their configurations).

A plan names modules and parameters, with `*` for a layer's number, and says of each how it is cut."""

import re
from collections.abc import Mapping
from typing import Final

SUMMED: Final = frozenset({"rowwise", "moe_tp_experts", "all_reduce"})
"""Modules of which each rank returns a part of a sum."""
GATHERED: Final = "colwise_gather_output"
"""A head, of which each rank returns its part of the vocabulary."""
DIMS: Final = {
    "colwise": (-2, 1),
    GATHERED: (-2, 1),
    "packed_colwise": (-2, 2),
    "rowwise": (-1, 1),
    "packed_rowwise": (-1, 2),
}
"""The dimension of a matrix (.., outputs, inputs) that is cut, and how many matrices lie side by side in it."""
_WHOLE: Final = {
    "replicate",
    "replicated_with_grad_allreduce",
    "mla_kv_a_proj",
    "embedding_rowwise",
    "embedding_colwise",
}
"""What every rank has all of here: these say how gradients are summed, and embeddings spread."""
_KEYS: Final = re.compile(r"(.*\.)?(k_proj|kv_b_proj|qkv_proj|query_key_value)")


def problem(plan: Mapping[str, str]) -> str:
    """Return why ranks cannot follow the plan, as the end of a sentence; empty where they can."""
    if not plan:
        return "it has no plan for that (base_model_tp_plan)"
    if unknown := sorted(set(plan.values()) - _WHOLE - SUMMED - DIMS.keys()):
        return f"its plan (base_model_tp_plan) has {', '.join(unknown)}"
    if not any(style == "colwise" and _KEYS.fullmatch(name) for name, style in plan.items()):
        return "its plan (base_model_tp_plan) leaves the heads of attention together"
    return ""
