"""A model's description as `parallel` sees it: what may be cut, and how much each piece weighs."""

from models.spec import ModelSpec
from parallel.plans import Dims


def dims_of(spec: ModelSpec) -> Dims:
    head_weights = spec.vocab_size * spec.hidden_size
    return Dims(
        spec.num_layers,
        spec.num_heads,
        spec.num_kv_heads,
        spec.vocab_size,
        (spec.intermediate_size,),
        (_layer_weights(spec),) * spec.num_layers,
        head_weights,
        head_weights,
    )


def _layer_weights(spec: ModelSpec) -> int:
    attention = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    return spec.hidden_size * (attention + 3 * spec.intermediate_size)
