"""The modules of a model beside which adapters may have matrices."""

from core.errors import UnsupportedModel
from models.spec import ModelSpec

Targets = dict[str, tuple[int, int]]
"""By a module's name in the checkpoint, its outputs and inputs."""


def targets_of(spec: ModelSpec) -> Targets:
    """Return those of all layers: attention with keys and values for each head, and dense blocks. Raises UnsupportedModel where
    there is none."""
    head = f"{spec.architecture}: adapters are not supported"
    if spec.implementation == "transformers":
        raise UnsupportedModel(f"{head} where transformers computes the layers")
    if spec.encodes:
        raise UnsupportedModel(f"{head} for encoders")
    targets: Targets = {}
    for layer in range(spec.num_layers):
        if _has_heads(spec, layer):
            targets |= _attention(spec, f"model.layers.{layer}.self_attn.")
        if spec.moe is None or not spec.moe.sparse[layer]:
            targets |= _dense(spec, f"model.layers.{layer}.{spec.mlp_name}.")
    if not targets:
        raise UnsupportedModel(f"{head} for its kinds of layers")
    return targets


def _has_heads(spec: ModelSpec, layer: int) -> bool:
    is_recurrent = spec.recurrent is not None and spec.recurrent.kinds[layer] != "kv"
    return spec.mla is None and not spec.attention_gate and not is_recurrent


def _attention(spec: ModelSpec, prefix: str) -> Targets:
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    sizes = {"q": queries, "k": keys, "v": keys}
    if spec.fused_qkv:
        sizes = {"qkv": queries + 2 * keys}
    found = {f"{prefix}{name}_proj": (size, spec.hidden_size) for name, size in sizes.items()}
    return found | {f"{prefix}o_proj": (spec.hidden_size, queries)}


def _dense(spec: ModelSpec, prefix: str) -> Targets:
    *names, last = spec.projections
    rows = 2 * spec.intermediate_size // len(names)
    found = {prefix + name: (rows, spec.hidden_size) for name in names}
    return found | {prefix + last: (spec.hidden_size, spec.intermediate_size)}
