"""The rules against the names and shapes that transformers itself writes: together the ranks hold everything, once."""

import random

import pytest
import torch

from core.errors import UnsupportedModel
from parallel.mesh import Mesh
from parallel.plans import Dims
from parallel.rules import RULES, Rule, Sharding
from tests.models.checkpoints import DENSE

MESHES = [Mesh(tp=tp) for tp in (1, 2, 3, 4)]


def dims_of(config: object) -> Dims:
    c = config
    layers = c.num_hidden_layers  # type: ignore[attr-defined]
    each = [c.per_layer_config[i] for i in range(layers)] if c.model_type == "gemma4_text" else [c]
    return Dims(
        num_layers=layers,
        num_heads=c.num_attention_heads,
        num_kv_heads=min(one.num_key_value_heads for one in each),
        vocab_size=c.vocab_size,
        widths=(c.intermediate_size,),
        layer_weights=(1,) * layers,
        embedding_weights=1,
        head_weights=1,
    )  # type: ignore[attr-defined]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("family", sorted(DENSE))
def test_ranks_together_hold_every_element(family: str, mesh: Mesh) -> None:
    import transformers

    config = DENSE[family](random.Random(family), 1)
    dims = dims_of(config)
    if mesh.tp > dims.num_heads:
        pytest.skip("fewer heads than ranks")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shards = [Sharding(dims, mesh, rank) for rank in range(mesh.size)]
    for name, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        seen = torch.zeros(shape, dtype=torch.int32)
        for shard in shards:
            cut = shard(name, shape)
            index = torch.meshgrid(
                *[torch.cat([torch.arange(run.start, run.stop) for run in runs]) for runs in cut],
                indexing="ij",
            )
            seen[index] += 1
        whole = "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias", "layer_scalar"))
        assert int(seen.min()) >= 1, name
        if whole:
            assert int(seen.min()) == mesh.tp, name
        elif not ("k_proj" in name or "v_proj" in name) or mesh.tp <= dims.num_kv_heads:
            assert int(seen.max()) == 1, f"{name} is on more than one rank"


def test_a_tensor_without_a_rule_or_with_two_is_refused_by_name() -> None:
    dims = Dims(
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        vocab_size=8,
        widths=(4,),
        layer_weights=(1,),
        embedding_weights=1,
        head_weights=1,
    )
    with pytest.raises(UnsupportedModel, match=r"no rule .*'model\.layers\.0\.mlp\.mystery'"):
        Sharding(dims, Mesh(), 0)("model.layers.0.mlp.mystery", (4,))
    doubled = (*RULES, Rule(r"lm_head\..*"))
    with pytest.raises(UnsupportedModel, match="2 rules"):
        Sharding(dims, Mesh(), 0, doubled)("lm_head.weight", (8, 2))
