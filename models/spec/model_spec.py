"""A decoder-only model or an encoder, described without its family: all that the engine and the forward pass must know."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from core.errors import ConfigError, UnsupportedModel
from core.kv import KVLayout, num_blocks_for
from kernels.routing import Routing
from models.spec.compressed_spec import CompressedSpec, StreamsSpec
from models.spec.foreign_cache import ForeignCache
from models.spec.kv_spec import KVSpec, LayerHeads
from models.spec.latent_spec import MlaSpec
from models.spec.quantisation import Quantisation
from models.spec.recurrent_spec import RecurrentSpec
from models.spec.vision_spec import VisionSpec

DTYPES = ("float32", "bfloat16", "float16")
Implementation = Literal["auto", "baton", "transformers"]
LoadFormat = Literal["auto", "dummy"]
Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "limited_silu", "relu2"]
QkNorm = Literal["none", "head", "unit", "rotated", "projection"]
RopeKind = Literal["none", "default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
_ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
    "longrope": (),
}
LONGROPE_LISTS = ("short_factor", "long_factor")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    kind: RopeKind
    theta: float
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    axes: tuple[int, ...] = ()
    """Which of a token's three positions (step, row, column) each frequency turns with, where images lie in a plane. Empty: all
    turn with the only one."""
    head_dim: int = 0
    """The size of heads that it turns, where that is not the model's; 0: it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNorms:
    """What a checkpoint calls the norms of a layer; empty where the layer has none."""

    before_attention: str = "input_layernorm"
    after_attention: str = ""
    before_mlp: str = "post_attention_layernorm"
    after_mlp: str = ""
    """The norms behind attention and behind the MLP come before the residual is added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    num_experts: int
    intermediate_size: int
    """The intermediate size of one expert."""
    routing: Routing
    sparse: tuple[bool, ...]
    """Which layers have experts; the others have the model's dense block."""
    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """What a checkpoint calls the matrices of a single expert. The first of two is ups, without gates."""
    latent_size: int = 0
    """The size of what experts take and give, where a projection makes it of the hidden state; 0: `hidden_size`."""
    weighs_inputs: bool = False
    """Whether a token's weight is multiplied into what its expert takes, in place of what it gives. `routing.top_k` is then 1."""
    transposed: bool = False
    """Whether all experts may be in one tensor, transposed, gates before ups."""
    by_turns: bool = False
    """Whether all experts are in one tensor, transposed, in which gates and ups alternate. Each matrix then has a bias."""
    mxfp4: bool = False
    """The same, not transposed and with four bits to a weight."""
    block_name: str = "mlp"
    """What a checkpoint calls a layer's block of experts."""
    router: str = "gate"
    router_bias: bool = False
    choice_bias: str = ""
    """What a checkpoint calls the bias by which experts are chosen but not weighed, within the block; empty: there is none."""
    by_token: tuple[bool, ...] = ()
    """Whether each layer has a table of every token's experts, which its router only weighs; empty: none has."""
    choice_bias_is_matrix: bool = False
    """Whether a checkpoint has that as a matrix of one row."""
    shared_size: int = 0
    """Inner size of what every token passes beside its experts; 0: there is none."""
    shared_name: str = "mlp.shared_experts"
    """Within the layer."""
    shared_gate: bool = False
    """Whether each token decides how much of the shared part it takes."""
    beside_dense: bool = False
    """Whether a layer with experts has the model's dense block, too (`models/layers/dense_and_experts.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputsSpec:
    """What each layer takes of each token beside the residual."""

    size: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryTemperature:
    """Queries grow with their position (arXiv:2501.19399): by 1 + scale * ln(1 + the number of whole `floor_tokens`)."""

    floor_tokens: float
    scale: float
    counts_itself: bool = True
    """Whether a token is among those of which whole `floor_tokens` are counted; otherwise those before it are."""
    everywhere: bool = False
    """Whether all queries grow; otherwise those of layers that rotate nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """The heads that the cache has; with latent attention, one."""
    head_dim: int
    """Dimensions of queries and keys."""
    norm_eps: float
    max_context_tokens: int
    """max_position_embeddings, or fewer where fewer are served. Dynamic rope scaling begins beyond it: there every key would
    change with each later token, so that no key could be cached."""
    rope: RopeSpec
    layer_ropes: tuple[RopeSpec, ...] = ()
    """Each layer's rotation, where layers differ; empty: `rope` is that of all."""
    tied: bool
    dtype: str
    """The checkpoint's dtype."""
    quantisation: Quantisation | None = None
    """How matrices may be stored that are not floats."""
    activation: Activation = "silu"
    swiglu: tuple[float, float] = (1.0, 0.0)
    """Alpha and limit of clamped_swiglu, of which limited_silu has the limit."""
    windows: tuple[int, ...] = ()
    """For each layer how many tokens it attends to; 0: all."""
    chunks: tuple[int, ...] = ()
    """For each layer the tokens of a chunk of text, within which a token attends; 0: to all. Empty: no layer has chunks."""
    query_temperature: QueryTemperature | None = None
    fused_qkv: bool = False
    """Whether a checkpoint has queries, keys and values in one matrix, `qkv_proj`."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    mlp_name: str = "mlp"
    """What a checkpoint calls a layer's dense block."""
    projections: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """What a checkpoint calls the matrices of a dense block, and of what every token passes beside experts. The first of two is
    gates, and then ups, or ups alone with `relu2`."""
    feeds: tuple[bool, ...] = ()
    """Whether each layer has a feed-forward block; empty: all have."""
    qk_norm: QkNorm = "none"
    """What of queries and of keys passes a norm: each head by itself; the same without weights, where they are rotated (Llama 4),
    or with weights, behind the rotation (Hunyuan); or all of them as one vector (OLMo 2)."""
    norms: LayerNorms = LayerNorms()
    one_norm: bool = False
    """Whether attention and the feed-forward block of a layer take the same, behind the norm before attention, and are added
    together."""
    centred: bool = False
    """Whether norms take the mean off what they normalise. Here it is taken off all that is added to the residual, which then has
    none."""
    mla: MlaSpec | None = None
    compressed: CompressedSpec | None = None
    """What the layers keep of a sequence, where older tokens are summed up."""
    streams: StreamsSpec | None = None
    """The residual's streams, where it has several."""
    recurrent: RecurrentSpec | None = None
    """What the layers keep of a sequence, where some keep a state in place of keys and values."""
    kv: KVSpec | None = None
    """What the layers have of keys and values, where they differ; `num_kv_heads` and `head_dim` are then the first one's."""
    cache: ForeignCache | None = None
    """What transformers' cache keeps, where transformers attends, too."""
    layer_scalars: bool = False
    """Whether what leaves a layer is multiplied by a number of the layer."""
    layer_inputs: LayerInputsSpec | None = None
    mlp_sizes: tuple[int, ...] = ()
    """The inner size of each layer's dense block, where they differ; empty: `intermediate_size` is that of all."""
    moe: MoeSpec | None = None
    mtp_layers: tuple[str, ...] = ()
    """Beginnings of names of the tensors of each layer for multi-token prediction."""
    skipped_prefixes: tuple[str, ...] = ()
    """Beginnings of names of tensors that no layer has a use for."""
    rotary_dim: int = 0
    """The leading dimensions of each head that are rotated; 0: all."""
    rotates_neighbours: bool = False
    """Rotated pairs are neighbours in the checkpoint, in place of one dimension of each half."""
    attention_gate: bool = False
    """Whether queries come with gates, by whose sigmoid each head's result is multiplied."""
    sinks: bool = False
    """Whether each head may attend to nothing, by a learned score beside those of the tokens."""
    unit_offset_norm: bool = False
    """Norm weights are stored as an offset from one."""
    embedding_scale: float = 1.0
    query_scale: float = 0.0
    """Factor on attention scores; 0: 1 / sqrt(head_dim)."""
    residual_scale: float = 1.0
    """Factor on what each half of a layer adds to the residual."""
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    logit_divisor: float = 1.0
    may_lack_head: bool = False
    """The checkpoint was made to embed texts, for which nothing needs a head."""
    eos_token_ids: tuple[int, ...] = ()
    implementation: Literal["baton", "transformers"] = "baton"
    """Whose code computes the layers."""
    num_weights: int = 0
    """The numbers in the weights of a model that transformers computes."""
    uncut: str = ""
    """Why tensor-parallel ranks cannot share transformers' layers, as the end of a sentence; empty where they can."""
    stages: tuple[str, ...] = ()
    """What pipeline stages share of a model that transformers computes, by its names and in its order: `layers`, and what comes
    before and behind them. Empty where it has no plan for stages."""
    foreign_expert_share: float = 0.0
    """Which part of a layer's routed experts a token uses, where transformers computes the layers; 0: there are none."""
    encodes: bool = False
    """Each token attends to all of its text: it goes through the layers in one piece, nothing of it is kept, none follows."""
    vision: VisionSpec | None = None
    """None where the model reads text alone."""
    default_sampling: Mapping[str, float] = field(default_factory=dict[str, float])
    """From generation_config.json: temperature, top_p, top_k, min_p, repetition_penalty where given."""

    @property
    def rotated_dim(self) -> int:
        return (self.rotary_dim or self.head_dim) if self.mla is None else self.mla.rope_dim

    @property
    def expert_share(self) -> float:
        """Return which part of a layer's routed experts a token uses; 0 where there are none."""
        if self.moe is None:
            return self.foreign_expert_share
        return self.moe.routing.top_k / self.moe.num_experts

    @property
    def kept(self) -> RecurrentSpec | KVSpec | ForeignCache | None:
        """Return what says which of the pool's layers a stage has; None where each layer writes its own."""
        return self.recurrent or self.kv or self.cache

    def heads_of(self, layer: int) -> LayerHeads:
        """Return what a layer's keys and values have."""
        if self.kv is not None:
            return self.kv.heads[layer]
        return LayerHeads(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)

    def has_mixer(self, layer: int) -> bool:
        """Return whether a layer attends or keeps a state."""
        return self.recurrent is None or self.recurrent.kinds[layer] != "none"

    def has_mlp(self, layer: int) -> bool:
        """Return whether a layer has a feed-forward block."""
        return not self.feeds or self.feeds[layer]

    @property
    def num_ups(self) -> int:
        """Return the matrices with which a feed-forward block multiplies its input: gates and ups, or ups alone."""
        return 1 if self.activation == "relu2" else 2

    @property
    def expert_inputs(self) -> int:
        """Return the size of what experts take and give."""
        return self.hidden_size if self.moe is None else self.moe.latent_size or self.hidden_size

    def mlp_size(self, layer: int) -> int:
        """Return the inner size of a layer's dense block."""
        return self.mlp_sizes[layer] if self.mlp_sizes else self.intermediate_size

    @property
    def attention_scale(self) -> float:
        return self.query_scale or 1.0 / math.sqrt(self.head_dim)

    def kv_layout(self, block_size: int, dtype: str) -> KVLayout:
        """An encoder's has no layers: its blocks count tokens and take no memory. Raises UnsupportedModel."""
        for chunk in filter(None, self.chunks):
            if chunk % block_size:
                raise UnsupportedModel(
                    f"attention_chunk_size is {chunk} in config.json, which engine.block_size {block_size} does not divide: "
                    "set one that does"
                )
        if (own := self.cache or self.compressed) is not None:
            return own.layout(block_size, dtype)
        num_kept = self.num_layers if self.kept is None else self.kept.num_kv_layers
        layout = KVLayout(
            num_layers=0 if self.encodes else num_kept,
            num_kv_heads=self.num_kv_heads if self.kv is None else self.kv.pool_heads,
            head_dim=self._pool_dim,
            block_size=block_size,
            dtype=dtype,
            state="kv" if self.mla is None else "mla",
            group=0 if self.mla is None else self.mla.scale_group,
            kept=(0, 0) if self.mla is None else (self.mla.kv_rank, self.mla.latent_size),
        )
        if self.recurrent is None:
            return layout
        num_slots = self.recurrent.num_slots(layout.slot_bytes)
        return replace(layout, state_blocks=num_blocks_for(num_slots, block_size))

    @property
    def _pool_dim(self) -> int:
        if self.mla is not None:
            return self.mla.token_size
        return self.head_dim if self.kv is None else self.kv.vector_dim


def read_json(path: Path, kind: type = dict) -> Any:
    """Read a JSON file. Raises ConfigError when it is missing or holds no `kind`."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} is no model folder: it has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(content, kind):
        raise ConfigError(f"{path} does not hold a JSON {'object' if kind is dict else 'array'}")
    return content


def rope_spec(config: Mapping[str, Any]) -> RopeSpec:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before). Raises UnsupportedModel."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedModel("rope_parameters that differ by layer type are not supported in this family")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in _ROPE_NEEDS:
        raise UnsupportedModel(f"rope scaling {kind!r} is not supported ({', '.join(_ROPE_NEEDS)} are)")
    for name in _ROPE_NEEDS[kind]:
        value = parameters.get(name)
        if not isinstance(value, int | float) or value <= 0:
            raise UnsupportedModel(
                f"rope scaling {kind!r} needs a positive {name!r}; config.json says {value!r}"
            )
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModel(f"partial_rotary_factor {partial} is not supported (only 1.0)")
    for name in LONGROPE_LISTS if kind == "longrope" else ():
        values = parameters.get(name)
        if not isinstance(values, list) or not all(isinstance(x, int | float) and x > 0 for x in values):
            raise UnsupportedModel(
                f"rope scaling 'longrope' needs positive numbers as {name!r}; config.json says {values!r}"
            )
    theta = parameters.get("rope_theta", config.get("rope_theta", 10000.0))
    original = config.get("original_max_position_embeddings")
    original = original or parameters.get("original_max_position_embeddings")
    longest = config["max_position_embeddings"]
    parameters["original_max_position_embeddings"] = original = int(original or longest)
    if kind in ("yarn", "longrope"):
        parameters["factor"] = float(parameters.get("factor") or longest / original)
    return RopeSpec(kind, float(theta), parameters, _axes(parameters))


def _axes(parameters: Mapping[str, Any]) -> tuple[int, ...]:
    """Return `RopeSpec.axes`, from the number of frequencies that turn with each position: one behind the other, or by turns as
    long as there are some of rows and columns."""
    sections = parameters.get("mrope_section") or ()
    if not parameters.get("mrope_interleaved"):
        return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    return tuple(at % 3 if at < 3 * sections[at % 3] else 0 for at in range(sum(sections)))
