"""The modules of a model beside which adapters may have matrices."""

from core.errors import UnsupportedModel
from models.spec.model_spec import ModelSpec

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
            targets |= _attention(spec, layer, f"model.layers.{layer}.self_attn.")
        is_dense = spec.moe is None or not spec.moe.sparse[layer] or spec.moe.beside_dense
        if is_dense and spec.has_mlp(layer):
            targets |= _dense(spec, layer, f"model.layers.{layer}.{spec.mlp_name}.")
    if not targets:
        raise UnsupportedModel(f"{head} for its kinds of layers")
    return targets


def _has_heads(spec: ModelSpec, layer: int) -> bool:
    is_recurrent = spec.recurrent is not None and spec.recurrent.kinds[layer] != "kv"
    return spec.mla is None and spec.compressed is None and not spec.attention_gate and not is_recurrent


def _attention(spec: ModelSpec, layer: int, prefix: str) -> Targets:
    heads = spec.heads_of(layer)
    queries, keys = spec.num_heads * heads.head_dim, heads.size
    sizes = (
        {"q": queries, "k": keys, "v": keys}
        if spec.kv is None
        else spec.kv.projections(layer, spec.num_heads)
    )
    if spec.fused_qkv:
        sizes = {"qkv": queries + 2 * keys}
    found = {f"{prefix}{name}_proj": (size, spec.hidden_size) for name, size in sizes.items()}
    return found | {f"{prefix}o_proj": (spec.hidden_size, queries)}


def _dense(spec: ModelSpec, layer: int, prefix: str) -> Targets:
    *names, last = spec.projections
    inner = spec.mlp_size(layer)
    rows = spec.num_ups * inner // len(names)
    found = {prefix + name: (rows, spec.hidden_size) for name in names}
    return found | {prefix + last: (spec.hidden_size, inner)}
