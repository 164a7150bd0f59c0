"""Every family in a shape that is awkward to cut."""

import random
from typing import Any

from tests.models.checkpoints import FAMILIES, HYBRID
from tests.models.gemma4_families import awkward_gemma4

HEADS = {
    "llama": (5, 1),
    "qwen2": (8, 2),
    "qwen2_moe": (8, 2),
    "qwen3": (6, 3),
    "deepseek_v2": (5, 5),
    "deepseek_v3": (5, 5),
    "glm4_moe_lite": (5, 5),
    "mistral4": (5, 5),
    "deepseek_v32": (5, 5),
    "glm_moe_dsa": (5, 5),
    "kimi_linear": (5, 5),
}
"""Query and KV heads that do not divide evenly (6, 2 elsewhere): some ranks have more, and some share a KV head."""


_ATTENDING = ("attention", "full_attention")


def awkward(family: str) -> Any:
    """A configuration of transformers: three layers, such heads, and experts for four ranks where there are any. With recurrent
    layers there are five, of which the first three and the last two can be stages."""
    if "gemma4" in family:
        return awkward_gemma4(family)
    config = (FAMILIES | HYBRID)[family](random.Random(family), 0)
    config.num_attention_heads, config.num_key_value_heads = HEADS.get(family, (6, 2))
    config.hidden_size = 16 * config.num_attention_heads
    config.num_hidden_layers = 3
    if hasattr(config, "mamba_d_head"):  # which must fit, also where no layer is recurrent
        config.mamba_n_heads, config.mamba_d_head = 8, config.hidden_size // 4
        config.mamba_n_groups = 1
    if hasattr(config, "mamba_num_heads"):
        config.mamba_num_heads, config.n_groups = 8, 2
    if hasattr(config, "linear_num_key_heads"):
        config.linear_num_key_heads, config.linear_num_value_heads = 4, 8
    if hasattr(config, "num_experts"):
        config.num_experts = 8  # as the other families have
    if hasattr(config, "no_rope_layers"):
        config.no_rope_layers = [1, 0, 1]
    if hasattr(config, "mlp_layer_types"):
        more = ["sparse", "dense"] if family in HYBRID else []
        config.mlp_layer_types = ["dense", "sparse", "sparse", *more]
    if hasattr(config, "indexer_types"):
        config.indexer_types = ["full", "shared", "full"]
    if family == "nemotron_h":
        names = ("linear_attention", "full_attention", "moe", "linear_attention", "full_attention")
        config.layers_block_type = list(names)
    elif family in HYBRID:
        own, attends = config.layer_types[0], next(each for each in config.layer_types if each in _ATTENDING)
        config.num_hidden_layers = 5
        config.layer_types = [own, attends, own, own, attends]
    elif getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i % 2] for i in range(3)]
    return config
