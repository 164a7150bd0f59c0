"""Which part of a checkpoint's tensor a rank holds, by the tensor's name.

A tensor that no rule matches, or more than one, is an error: an unknown matrix is never cut by guessing. Models know nothing of
this; they work with what they get (kernels/collectives.py says where ranks meet)."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from core.errors import UnsupportedModel
from parallel.mesh import Mesh
from parallel.plans import Dims, Range, Section, even_part, part_of

Unit = Literal[
    "heads", "kv_heads", "vocab", "width", "gate_up", "interleaved", "groups", "experts", "qkv", "convolved", "projected"
]  # fmt: skip
"""What a dimension is cut by. `width` is an MLP's inner size, or that of a recurrent layer's heads; `convolved` and `projected`
are those of `Dims`; `gate_up` is that of gate and up, one behind the other; `interleaved` the two alternating; `groups` the two
alternating, only cut between groups of MXFP4; `qkv` the heads of queries, keys and values, one behind the other."""


@dataclass(frozen=True, slots=True)
class Rule:
    pattern: str
    """A regular expression for the whole name."""
    cuts: tuple[tuple[int, Unit], ...] = ()
    """(dimension, unit). A dimension that is not named is whole on every rank."""


_LAYER = r"(model|mtp)\.layers\.\d+\."
_ATTENTION = _LAYER + r"self_attn\."
_MLP = (
    _LAYER
    + r"(mlp|mlp\.shared_experts|mlp\.shared_expert|mlp\.shared_mlp|feed_forward|feed_forward\.shared_expert)\."
)
_STATES = _LAYER + r"(linear_attn|mamba|conv)\."
_FUSED = _LAYER + r"shared_mlp\."
_EXPERTS = _LAYER + r"((mlp|block_sparse_moe|feed_forward)\.)?experts\."
_EXPERT = _EXPERTS + r"\d+\."

RULES: tuple[Rule, ...] = (
    Rule(r"model\.embed_tokens(_per_layer)?\.weight|lm_head\.weight", ((0, "vocab"),)),
    Rule(r"model\.norm\.weight|" + _LAYER + r"(input|post_(self_attn|attention|mlp)|(pre|post)_feedforward)_layernorm\.weight"),
    Rule(_LAYER + r"((pre|post)_feedforward_layernorm_[12]|norm|operator_norm|ffn_norm)\.weight"),
    # Column: the outputs are cut; a bias with them.
    Rule(_ATTENTION + r"(q_proj|q_b_proj|kv_b_proj)\.(weight|bias)", ((0, "heads"),)),
    Rule(_ATTENTION + r"[kv]_proj\.(weight|bias)", ((0, "kv_heads"),)),
    Rule(_ATTENTION + r"qkv_proj\.weight", ((0, "qkv"),)),
    Rule(_ATTENTION + r"sinks", ((0, "heads"),)),
    Rule(_MLP + r"(gate_proj|up_proj|w1|w3)\.(weight|bias)", ((0, "width"),)),
    Rule(_FUSED + r"input_linear\.weight", ((0, "gate_up"),)),
    Rule(_MLP + r"gate_up_proj\.weight", ((0, "gate_up"),)),
    Rule(_EXPERT + r"(gate_proj|up_proj|w1|w3)\.(weight|bias)", ((0, "width"),)),
    # Row: the inputs are cut, the ranks' products are summed, and then a whole bias is added.
    Rule(_ATTENTION + r"o_proj\.weight", ((1, "heads"),)),
    Rule(_MLP + r"(down_proj|w2)\.weight", ((1, "width"),)),
    Rule(_FUSED + r"output_linear\.weight", ((1, "width"),)),
    Rule(_EXPERT + r"(down_proj|w2)\.weight", ((1, "width"),)),
    # Recurrent layers, by their heads.
    Rule(_LAYER + r"linear_attn\.in_proj_(qkvz|ba|z|b|a)\.weight", ((0, "width"),)),
    Rule(_LAYER + r"linear_attn\.in_proj_qkv\.weight", ((0, "convolved"),)),
    Rule(_LAYER + r"(mamba|conv)\.in_proj\.(weight|bias)", ((0, "projected"),)),
    Rule(_STATES + r"conv(1d)?\.(weight|bias)", ((0, "convolved"),)),
    Rule(_STATES + r"(A_log|dt_bias|D)|" + _LAYER + r"mamba\.norm\.weight", ((0, "width"),)),
    Rule(_STATES + r"out_proj\.weight", ((1, "width"),)),
    # Attention to entries. The groups that a head's results are projected by are cut as heads are.
    Rule(_ATTENTION + r"o_a_proj\.weight", ((0, "width"),)),
    Rule(_ATTENTION + r"o_b_proj\.weight", ((1, "width"),)),
    Rule(_ATTENTION + r"(compressor\..+|kv_proj\.weight|(q_a|kv)_norm\.weight)"),
    Rule(_LAYER + r"((attn|ffn)_hc\.(fn|base|scale)|mlp\.gate\.tid2eid)|model\.hc_head\.hc_(fn|base|scale)"),
    # Whole on every rank.
    Rule(_LAYER + r"delta_attn\.[a-zA-Z_0-9.]+"),
    Rule(_LAYER + r"((mamba|conv)\.out_proj\.bias|linear_attn\.norm\.weight)"),
    Rule(_ATTENTION + r"(o_proj|q_a_proj|kv_a_proj_with_mqa)\.bias"),
    Rule(_ATTENTION + r"(q_a_proj|kv_a_proj_with_mqa|[qk]_norm|(query|key)_layernorm|q_a_layernorm|kv_a_layernorm)\.weight"),
    Rule(_ATTENTION + r"indexer\.((wq_b|wk|weights_proj)\.weight|k_norm\.(weight|bias))"),
    Rule(_MLP + r"down_proj\.bias"),
    Rule(_LAYER + r"(mlp|block_sparse_moe|feed_forward)\.(gate(\.wg)?|router(\.layer)?)\.(weight|bias|e_score_correction_bias)"),
    Rule(_LAYER + r"(mlp|block_sparse_moe)\.(moe_statics\.)?e_score_correction_bias|" + _LAYER + r"feed_forward\.expert_bias"),
    Rule(_LAYER + r"mlp\.(shared_expert_gate\.weight|fc[12]_latent_proj\.(weight|bias))"),
    Rule(_LAYER + r"(layer_scalar|router\.(scale|per_expert_scale|proj\.weight))"),
    Rule(_LAYER + r"(per_layer_input_gate|per_layer_projection|post_per_layer_input_norm)\.weight"),
    Rule(r"model\.per_layer_(model_projection|projection_norm)\.weight"),
    Rule(_LAYER + r"(enorm|hnorm|eh_proj|shared_head\.norm)\.weight"),
    Rule(r"mtp\.(pre_fc_norm_embedding|pre_fc_norm_hidden|fc|norm)\.weight"),
)  # fmt: skip

EXPERTS: tuple[Rule, ...] = (
    Rule(_EXPERTS[:-2], ((0, "experts"),)),
    Rule(_EXPERTS + r"gate_up_proj", ((0, "experts"), (1, "gate_up"))),
    Rule(_EXPERTS + r"down_proj", ((0, "experts"), (2, "width"))),
    Rule(_LAYER + r"block_sparse_moe\.input_linear\.weight", ((0, "experts"), (1, "gate_up"))),
    Rule(_LAYER + r"block_sparse_moe\.output_linear\.weight", ((0, "experts"), (2, "width"))),
)
"""Tensors of experts. Where each expert has tensors of its own, the rule says which experts; or all are in one, (experts, 2 x
width, hidden) and (experts, hidden, width)."""

TRANSPOSED: tuple[Rule, ...] = (
    EXPERTS[0],
    Rule(_EXPERTS + r"gate_up_proj", ((0, "experts"), (2, "gate_up"))),
    Rule(_EXPERTS + r"down_proj", ((0, "experts"), (1, "width"))),
)
"""Llama 4 and Qwen3-VL: (experts, hidden, 2 x width) and (experts, width, hidden), or each expert's own tensors."""
BY_TURNS: tuple[Rule, ...] = (
    Rule(_EXPERTS + r"gate_up_proj", ((0, "experts"), (2, "interleaved"))),
    Rule(_EXPERTS + r"gate_up_proj_bias", ((0, "experts"), (1, "interleaved"))),
    Rule(_EXPERTS + r"down_proj", ((0, "experts"), (1, "width"))),
    Rule(_EXPERTS + r"down_proj_bias"),
)
"""gpt-oss: (experts, hidden, 2 x width) and (experts, width, hidden)."""
BY_TURNS_MXFP4: tuple[Rule, ...] = (
    Rule(_EXPERTS + r"gate_up_proj_(blocks|scales|bias)", ((0, "experts"), (1, "groups"))),
    Rule(_EXPERTS + r"down_proj_(blocks|scales)", ((0, "experts"), (2, "width"))),
    Rule(_EXPERTS + r"down_proj_bias"),
)
"""The same with (experts, 2 x width, ..) and (experts, hidden, groups of the width, ..)."""
_GROUP = 32


class Sharding:
    """The `models.formats.checkpoint.Shard` of one rank. Call it with a name and a full shape."""

    def __init__(
        self,
        dims: Dims,
        mesh: Mesh,
        rank: int,
        rules: Sequence[Rule] = RULES + EXPERTS,
        experts: Sequence[int] | None = None,
    ) -> None:
        """`experts` are those that the rank holds, in the order of its slots; None means all."""
        self.part = part_of(dims, mesh, rank)
        self._experts = range(dims.num_experts) if experts is None else experts
        self._dims, self._tp, self._index = dims, mesh.tp, mesh.place(rank).tp
        self._rules = [(re.compile(rule.pattern), rule) for rule in rules]

    def __call__(self, name: str, shape: tuple[int, ...]) -> list[list[slice]]:
        """Return, for each dimension, the runs that this rank holds. Raises UnsupportedModel."""
        matching = [rule for pattern, rule in self._rules if pattern.fullmatch(name)]
        if len(matching) != 1:
            how = "no rule says" if not matching else f"{len(matching)} rules say differently"
            raise UnsupportedModel(f"{how} how tensor {name!r} is cut over an instance's ranks")
        cuts = dict(matching[0].cuts)
        return [
            [slice(*run) for run in self._runs(cuts[dim], size)] if dim in cuts else [slice(0, size)]
            for dim, size in enumerate(shape)
        ]

    @property
    def identity(self) -> str:
        """Name what the rank holds: ranks with equal names hold the same."""
        rules = [rule for _, rule in self._rules]
        return repr((self.part, tuple(self._experts), self._dims, self._tp, self._index, rules))

    def _runs(self, unit: Unit, size: int) -> list[Range]:
        return self._UNITS[unit](self, size)

    def _joint_heads(self, size: int) -> list[Range]:
        part, dims = self.part, self._dims
        keys, values = dims.num_heads, dims.num_heads + dims.num_kv_heads
        starts = (0, part.heads), (keys, part.kv_heads), (values, part.kv_heads)
        dim = size // (values + dims.num_kv_heads)
        return [_scaled((start + first, start + end), dim) for start, (first, end) in starts]

    def _halves(self, size: int) -> list[Range]:
        first, end = self._even(size // 2)
        return [(first, end), (size // 2 + first, size // 2 + end)]

    def _even(self, size: int) -> Range:
        return even_part(size, self._tp, self._index)

    def _sections(self, sections: Sequence[Section]) -> list[Range]:
        runs: list[Range] = []
        start = 0
        for size, is_cut in sections:
            first, end = self._even(size) if is_cut else (0, size)
            runs.append((start + first, start + end))
            start += size
        return runs

    _UNITS: ClassVar[dict[Unit, Callable[["Sharding", int], list[Range]]]] = {
        "heads": lambda self, size: [_scaled(self.part.heads, size // self._dims.num_heads)],
        "kv_heads": lambda self, size: [_scaled(self.part.kv_heads, size // self._dims.num_kv_heads)],
        "qkv": _joint_heads,
        "convolved": lambda self, _: self._sections(self._dims.convolved),
        "projected": lambda self, _: self._sections(self._dims.projected),
        "vocab": lambda self, _: [self.part.vocab],
        "experts": lambda self, _: _joined(self._experts),
        "width": lambda self, size: [self._even(size)],
        "gate_up": _halves,
        "interleaved": lambda self, size: [_scaled(self._even(size // 2), 2)],
        "groups": lambda self, size: [_scaled(self._even(size // (2 * _GROUP)), 2 * _GROUP)],
    }
    """The runs that this rank has of a dimension of that size, by what the dimension counts."""


def _scaled(run: Range, unit: int) -> Range:
    return run[0] * unit, run[1] * unit


def _joined(rows: Sequence[int]) -> list[Range]:
    """Return the rows in their order, with neighbours that follow each other as one run."""
    runs: list[Range] = []
    for row in rows:
        if runs and runs[-1][1] == row:
            runs[-1] = runs[-1][0], row + 1
        else:
            runs.append((row, row + 1))
    return runs
