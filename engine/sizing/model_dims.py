"""A model's description as `parallel` sees it: what may be cut, and how much each piece weighs."""

from core.config.parallel_config import ParallelConfig
from core.errors import ConfigError
from core.kv import DTYPE_BYTES, KVLayout, KVShard
from models.spec.compressed_spec import CompressedSpec
from models.spec.kv_spec import KVSpec
from models.spec.model_spec import ModelSpec
from models.spec.recurrent_spec import RecurrentSpec
from parallel.mesh import Mesh
from parallel.plans import Dims, Section, check, part_of
from parallel.rules import BY_TURNS, BY_TURNS_MXFP4, EXPERTS, RULES, TRANSPOSED, Rule


def dims_of(spec: ModelSpec) -> Dims:
    head_weights = spec.vocab_size * spec.hidden_size
    kv_heads = kv_units(spec)
    sparse = (False,) * spec.num_layers if spec.moe is None else spec.moe.sparse
    plain = [spec.has_mlp(layer) and not is_sparse for layer, is_sparse in enumerate(sparse)]
    has_dense = any(plain) or (spec.moe is not None and spec.moe.beside_dense)
    widths = [spec.intermediate_size] if has_dense else []
    if spec.moe is not None:
        widths += [spec.moe.intermediate_size, *filter(None, [spec.moe.shared_size])]
    return Dims(
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=kv_heads,
        vocab_size=spec.vocab_size,
        widths=tuple(widths),
        layer_weights=tuple(
            mixer_weights(spec, layer, spec.num_heads, kv_heads) + _mlp_weights(spec, layer, sparse=is_sparse)
            for layer, is_sparse in enumerate(sparse)
        ),
        embedding_weights=head_weights + input_table(spec),
        head_weights=head_weights,
        num_experts=0 if spec.moe is None else spec.moe.num_experts,
        **_recurrent_sections(spec.recurrent),
        stage_starts=_stage_starts(spec),
    )


def _stage_starts(spec: ModelSpec) -> tuple[int, ...]:
    """Return `Dims.stage_starts`. A layer that shares the tokens which an earlier one has chosen is in that one's stage, and one
    that takes inputs of its own in the first, which alone can make them."""
    if spec.layer_inputs is not None or spec.streams is not None:
        return (0,)
    if spec.mla is not None and spec.mla.index is not None and not all(spec.mla.index.chooses):
        return tuple(layer for layer, chooses in enumerate(spec.mla.index.chooses) if chooses)
    return () if spec.kept is None else spec.kept.stage_starts


def kv_units(spec: ModelSpec) -> int:
    """Return the most parts that ranks may cut KV heads into, which is their number where all layers have the same."""
    return spec.num_kv_heads if spec.kv is None else spec.kv.cut_heads


def input_table(spec: ModelSpec) -> int:
    """Return the numbers of the table of what each layer takes of a token beside the residual."""
    inputs = spec.layer_inputs
    return 0 if inputs is None else inputs.vocab_size * inputs.size * spec.num_layers


def _recurrent_sections(kept: RecurrentSpec | None) -> dict[str, tuple[Section, ...]]:
    """Return what `Dims` has of recurrent layers. A state space with one key head has that on every rank."""
    if kept is None:
        return {}
    shape = kept.shape
    keys, values = (shape.key_size, shape.num_key_heads > 1), (shape.value_size, True)
    if "short_convolution" in kept.kinds:
        return {"convolved": (values,), "projected": (values,) * 3}
    if "state_space" not in kept.kinds:
        return {"convolved": (keys, keys, values)}
    return {
        "convolved": (values, keys, keys),
        "projected": (values, values, keys, keys, (shape.num_value_heads, True)),
    }


def check_mesh(spec: ModelSpec, mesh: Mesh, role: str, num_spare: int = 0) -> None:
    """Run `parallel.plans.check`, and refuse to cut layers of transformers otherwise than it does. Raises ConfigError."""
    if spec.implementation == "transformers" and mesh.size > 1:
        _check_foreign(spec, mesh, role)
    if spec.recurrent is not None and spec.mla is None:
        _check_recurrent(spec, spec.recurrent, mesh, role)
    if spec.kv is not None:
        _check_sized(spec, spec.kv, mesh, role)
    if spec.compressed is not None:
        _check_compressed(spec, spec.compressed, mesh, role)
    check(dims_of(spec), mesh, role, num_spare)


def _check_foreign(spec: ModelSpec, mesh: Mesh, role: str) -> None:
    """Raise ConfigError for ranks among which layers of transformers cannot be shared out."""
    head = f"{role}: {mesh} is impossible for {spec.architecture}, whose layers transformers computes"
    if spec.encodes:
        raise ConfigError(f"{head}: an instance of it is one rank. Leave {role}.tp, pp, dp and ep at 1")
    if mesh.dp * mesh.ep > 1:
        raise ConfigError(f"{head}: its ranks cannot share sequences or experts. Leave {role}.dp and ep at 1")
    if mesh.pp > 1 and spec.cache is not None:
        raise ConfigError(
            f"{head}: stages cannot share the cache that transformers makes of it. Leave {role}.pp at 1"
        )
    if mesh.pp > 1 and not spec.stages:
        raise ConfigError(f"{head}: it has no plan for stages (base_model_pp_plan). Leave {role}.pp at 1")
    if mesh.tp > 1 and spec.uncut:
        raise ConfigError(f"{head}: {spec.uncut}. Leave {role}.tp at 1")
    if spec.num_kv_heads % mesh.tp or spec.num_heads % mesh.tp:
        raise ConfigError(
            f"{head}: its {spec.num_heads} heads and {spec.num_kv_heads} KV heads cannot be shared out evenly over {mesh.tp} "
            f"ranks. Set {role}.tp to a number that divides both"
        )


def _check_recurrent(spec: ModelSpec, kept: RecurrentSpec, mesh: Mesh, role: str) -> None:
    """Raise ConfigError for tensor-parallel ranks over which states cannot be spread."""
    keys, kv_heads, tp = kept.shape.num_key_heads, spec.num_kv_heads, mesh.tp
    spans = keys == 1 and "gated_delta" not in kept.kinds
    possible = [
        tp
        for tp in range(1, kv_heads + 1)
        if tp == 1 or (kept.num_parts > 1 and kv_heads % tp == 0 and (spans or keys % tp == 0))
    ]
    if tp not in possible:
        nearest = min(possible, key=lambda found: (abs(found - tp), found))
        raise ConfigError(
            f"{role}: {mesh} is impossible for {spec.architecture}: {kv_heads} KV heads and {keys} key heads of its recurrent "
            f"layers cannot be shared out evenly over {tp} tensor-parallel ranks. Nearest possible: {role}.tp={nearest}"
        )


def _check_sized(spec: ModelSpec, kv: KVSpec, mesh: Mesh, role: str) -> None:
    """Raise ConfigError for ranks over which layers with heads of several kinds cannot be spread."""
    head = f"{role}: {mesh} is impossible for {spec.architecture}"
    if mesh.tp > kv.cut_heads:
        raise ConfigError(
            f"{head}: some of its layers have {kv.cut_heads} KV heads, and ranks cannot share one of these. Set {role}.tp to "
            f"{kv.cut_heads} at most"
        )
    if mesh.pp > 1 and spec.layer_inputs is not None:
        raise ConfigError(
            f"{head}: each layer takes inputs that only a first stage could make (hidden_size_per_layer_input). Leave "
            f"{role}.pp at 1"
        )


def _check_compressed(spec: ModelSpec, kept: CompressedSpec, mesh: Mesh, role: str) -> None:
    """Raise ConfigError for ranks that cannot share the groups of heads, or streams."""
    head = f"{role}: {mesh} is impossible for {spec.architecture}"
    if kept.out_groups % mesh.tp:
        raise ConfigError(
            f"{head}: its {kept.out_groups} groups of heads (o_groups) cannot be shared out evenly over {mesh.tp} ranks. Set "
            f"{role}.tp to a number that divides them"
        )
    if mesh.pp > 1:
        raise ConfigError(
            f"{head}: stages cannot send its residual, which has several streams. Leave {role}.pp at 1"
        )


def expert_bytes(spec: ModelSpec, dtype: str, tp: int) -> int:
    """Return the bytes of one expert's weights in one layer, as far as a rank has them."""
    assert spec.moe is not None
    weights = spec.moe.intermediate_size * ((spec.num_ups + 1) * spec.expert_inputs + 2 * spec.moe.by_turns)
    return -(-weights // tp) * DTYPE_BYTES[dtype]


def rules_of(spec: ModelSpec) -> tuple[Rule, ...]:
    """Return how the model's tensors are cut, named as its checkpoints name them."""
    moe = spec.moe
    if moe is not None and moe.by_turns:
        return RULES + (BY_TURNS_MXFP4 if moe.mxfp4 else BY_TURNS)
    return RULES + (TRANSPOSED if moe is not None and moe.transposed else EXPERTS)


def mesh_of(parallel: ParallelConfig) -> Mesh:
    return Mesh(pp=parallel.pp, dp=parallel.dp, ep=parallel.ep, tp=parallel.tp)


def shards_of(spec: ModelSpec, mesh: Mesh, layout: KVLayout) -> tuple[KVShard, ...]:
    """Return what each rank of a mesh keeps of the KV."""
    if spec.encodes:
        return (KVShard.whole(layout),)
    parts = [part_of(dims_of(spec), mesh, rank) for rank in range(mesh.size)]
    kept, each = spec.kept, layout.num_kv_heads // kv_units(spec) if spec.kv is not None else 1
    return tuple(
        KVShard(
            layout,
            part.layers if kept is None else kept.kv_layers(*part.layers),
            (part.kv_heads[0] * each, part.kv_heads[1] * each),
        )
        for part in parts
    )


def mixer_weights(spec: ModelSpec, layer: int, heads: int, kv_heads: int) -> int:
    """Return the number of weights in the part of a layer's attention that makes so many of its heads, or in what stands in its
    place. `kv_heads` are as `kv_units` counts them."""
    if not spec.has_mixer(layer):
        return 0
    if spec.kv is not None:
        own = spec.kv.projections(layer, spec.num_heads)
        keys = (sum(own.values()) - own["q"]) * kv_heads // spec.kv.cut_heads
        return spec.hidden_size * (2 * own["q"] * heads // spec.num_heads + keys)
    if spec.compressed is not None:
        streams = 0 if spec.streams is None else spec.streams.num_weights(spec.hidden_size)
        return spec.compressed.num_weights(layer, spec.hidden_size, spec.num_heads, heads) + streams
    if spec.recurrent is None or spec.recurrent.kinds[layer] == "kv":
        return _attention_weights(spec, heads, kv_heads) + _index_weights(spec, layer)
    shape, kind = spec.recurrent.shape, spec.recurrent.kinds[layer]
    if kind == "channel_delta":
        low = 2 * shape.value_dim + shape.num_value_heads
        inputs = spec.hidden_size * (3 * shape.value_size + low) + 2 * shape.value_dim * shape.value_size
        return inputs + spec.hidden_size * shape.value_size + shape.conv_channels * shape.conv_kernel
    gates = 2 if kind == "gated_delta" else 1
    inputs = shape.conv_channels + shape.value_size + gates * shape.num_value_heads
    inputs = 3 * shape.value_size if kind == "short_convolution" else inputs
    weights = spec.hidden_size * (inputs + shape.value_size) + shape.conv_channels * shape.conv_kernel
    return weights * heads // spec.num_heads


def _attention_weights(spec: ModelSpec, heads: int, kv_heads: int) -> int:
    if spec.mla is None:
        gates = heads * spec.attention_gate
        return spec.hidden_size * (2 * (heads + kv_heads) + gates) * spec.head_dim
    mla = spec.mla
    query = spec.hidden_size * heads * spec.head_dim
    if mla.q_rank:
        query = mla.q_rank * (spec.hidden_size + heads * spec.head_dim)
    latent = spec.hidden_size * (mla.kv_rank + mla.rope_dim)
    expanded = mla.kv_rank * heads * (mla.nope_dim + mla.value_dim)
    return query + latent + expanded + heads * mla.value_dim * spec.hidden_size


def _index_weights(spec: ModelSpec, layer: int) -> int:
    """Return the number of weights by which a layer chooses tokens, which every rank has whole."""
    mla = spec.mla
    if mla is None or mla.index is None or not mla.index.chooses[layer]:
        return 0
    heads, dim = mla.index.num_heads, mla.index.head_dim
    return mla.q_rank * heads * dim + spec.hidden_size * (dim + heads)


def _mlp_weights(spec: ModelSpec, layer: int, *, sparse: bool) -> int:
    if not spec.has_mlp(layer):
        return 0
    dense, inputs = spec.mlp_size(layer), 0 if spec.layer_inputs is None else spec.layer_inputs.size
    matrices = spec.num_ups + 1
    if spec.moe is None or not sparse:
        return spec.hidden_size * (matrices * dense + 2 * inputs)
    width = spec.moe.shared_size + dense * spec.moe.beside_dense
    experts = matrices * spec.moe.num_experts * spec.moe.intermediate_size * spec.expert_inputs
    beside = matrices * width + 2 * inputs + spec.moe.num_experts + 2 * spec.moe.latent_size
    return experts + spec.hidden_size * beside
