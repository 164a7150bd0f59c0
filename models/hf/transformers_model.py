"""A model whose layers transformers computes, with Baton's attention over the paged pool.

transformers' modules ask for attention through an interface, by the name that the model's configuration has. Baton's is
registered there: it stores keys and values in the pool and attends over it, so that such a model is batched, chunked,
prefix-cached and handed over like any other. All tokens of a step are one row of a batch; positions tell sequences apart.

As it is loaded a model is compared with what transformers itself computes: one that keeps or reads something else than the keys
and values that it was asked for is refused, not served wrongly."""

import contextvars
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from core.errors import UnsupportedModel
from kernels.collectives import ONE_RANK, Collectives
from kernels.ops import AttentionMeta, ExpertWeights, KVLayer, Ops
from models.hf.linear import pack_products
from models.hf.tp_cuts import cut, keep_stage
from models.lora.low_rank import no_adapters
from models.pooling.readout import NO_READOUT, Readout
from models.spec.model_spec import ModelSpec

_NAME: Final = "baton_paged"
_CHECKED: Final = (("a", 0, 5), ("b", 0, 3), ("a", 5, 4), ("b", 3, 1))
"""(sequence, first token, tokens) of each chunk. The comparison computes them two by two."""
_CHECK_BLOCK, _CHECK_BLOCKS = 4, 8


@dataclass(slots=True)
class _Step:
    """One forward pass, as its attention layers see it."""

    kv: Sequence[KVLayer]
    meta: AttentionMeta
    on_layer: Callable[[int], None] | None
    ops: Ops
    head_dim: int
    first: int
    """The index of the stage's first layer."""
    layers: list[int] = field(default_factory=list[int])
    """Indices of the layers that have asked for attention so far, in the order in which they did."""
    has_windows: bool = False
    """Whether a layer has asked for a sliding window."""


_STEP: contextvars.ContextVar[_Step] = contextvars.ContextVar("step")


@dataclass
class _Behind(BaseModelOutputWithPastAndCrossAttentions):
    """What layers return, with the field that only some of them have."""

    router_logits: Any = None


class _Given(nn.Module):
    """Takes the place of the layers where only what comes behind them is to be computed."""

    hidden: Tensor

    @property
    def decoder(self) -> "_Given":
        """The decoder under the name that some heads use, which is one level deeper."""
        return self

    def forward(self, *_: Any, **__: Any) -> _Behind:
        return _Behind(last_hidden_state=self.hidden)  # type: ignore[arg-type]


class TransformersModel:
    """A models.causal_model.CausalModel."""

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        layers: range,
        *,
        tolerance: float,
        readout: Readout = NO_READOUT,
        collectives: Collectives = ONE_RANK,
        on_read: Callable[[], None],
    ) -> None:
        """`tolerance`: how far logits may be off transformers' own, as a share of their length. `layers` are those of this
        stage. A rank of several loads all of the model into the host's memory before it is cut. Raises UnsupportedModel."""
        self._tolerance, self.readout = tolerance, readout
        self.spec, self.dtype, self.layers = spec, dtype, layers
        self.is_first, self.is_last = layers.start == 0, layers.stop == spec.num_layers
        # transformers launches what it likes: nothing of it is captured.
        self.ops = replace(ops, fixed_step=None)
        self.expert_load = torch.zeros(len(layers), 0, dtype=torch.int64, device=device)
        self.experts: Mapping[int, ExpertWeights] = {}
        heads = collectives.share(spec.num_kv_heads)
        self._num_kv_heads = heads.stop - heads.start
        is_cut, is_stage = self._num_kv_heads < spec.num_kv_heads, len(layers) < spec.num_layers
        host = torch.device("cpu")
        causal = _load(folder, spec, dtype, host if is_cut or is_stage else device)
        self.adapters = no_adapters()
        self.bytes_read = sum(tensor.nbytes for tensor in causal.state_dict().values())
        on_read()
        self._base = causal.base_model
        self._given = _Given()
        self._head = _with_given(causal, self._given)
        try:
            examples = _examples(causal, spec, layers)
            if is_stage:
                keep_stage(causal, spec.stages, layers)
            if is_cut:
                cut(causal, causal.tp_plan, collectives)
            causal.to(device)
            pack_products(causal, ops, dtype)
            self._compare(examples)
        except (AttributeError, TypeError, KeyError, IndexError, RuntimeError) as error:
            raise self._refused(
                f"transformers' code for it does not run over packed tokens: {error}"
            ) from error

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        kv: Sequence[KVLayer],
        meta: AttentionMeta,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        return self._run(x, positions, self._step(kv, meta, on_layer))

    def logits(self, hidden: Tensor) -> Tensor:
        self._given.hidden = hidden[None]
        return self._head(input_ids=hidden.new_zeros(1, len(hidden), dtype=torch.int64)).logits[0].float()

    def _step(
        self, kv: Sequence[KVLayer], meta: AttentionMeta, on_layer: Callable[[int], None] | None
    ) -> _Step:
        return _Step(kv, meta, on_layer, self.ops, self.spec.head_dim, self.layers.start)

    def _run(self, x: Tensor, positions: Tensor, step: _Step) -> Tensor:
        given = {"input_ids" if self.is_first else "inputs_embeds": x[None]}
        with _as_current(step):
            out = self._base(**given, position_ids=positions[None], use_cache=False)
        return out.last_hidden_state[0]

    def _compare(self, examples: Mapping[str, "_Example"]) -> None:
        """Compute two sequences in chunks through the pool, and compare what comes with what transformers' own attention and
        products make of them. Raises UnsupportedModel."""
        device = self.expert_load.device
        ours: dict[str, list[Tensor]] = {key: [] for key in examples}
        layout = self.spec.kv_layout(_CHECK_BLOCK, str(self.dtype).removeprefix("torch."))
        shape = (_CHECK_BLOCKS, 2, self._num_kv_heads, _CHECK_BLOCK, layout.head_dim)
        pool = [torch.zeros(shape, dtype=self.dtype, device=device) for _ in self.layers]
        for first in range(0, len(_CHECKED), 2):
            self._compute(_CHECKED[first : first + 2], examples, pool, ours)
        for key, parts in ours.items():
            theirs = examples[key].made.to(device).float()
            off = float((torch.cat(parts) - theirs).norm() / theirs.norm().clamp_min(1e-9))
            if not off <= self._tolerance:
                raise self._refused(
                    f"over a paged cache its results are {off:.0%} off what transformers computes without one"
                )

    def _compute(
        self,
        chunks: Sequence[tuple[str, int, int]],
        examples: Mapping[str, "_Example"],
        pool: Sequence[Tensor],
        made: Mapping[str, list[Tensor]],
    ) -> None:
        tables = {"a": np.arange(0, 4), "b": np.arange(4, 8)}
        positions = np.concatenate([np.arange(start, start + count) for _, start, count in chunks])
        slots = np.concatenate(
            [
                tables[key][np.arange(start, start + count) // _CHECK_BLOCK] * _CHECK_BLOCK
                + np.arange(start, start + count) % _CHECK_BLOCK
                for key, start, count in chunks
            ]
        )
        device = pool[0].device
        meta = AttentionMeta.build(
            [count for _, _, count in chunks],
            [start + count for _, start, count in chunks],
            [tables[key] for key, _, _ in chunks],
            slots,
            device,
        )
        step = self._step(pool, meta, None)
        packed = torch.cat([examples[key].given[start : start + count] for key, start, count in chunks])
        packed = packed.to(device)
        hidden = self._run(packed, torch.from_numpy(positions).to(device), step)
        if step.layers != list(self.layers):
            raise self._refused(
                f"its {len(self.layers)} layers asked for attention {len(step.layers)} times, or not in their order"
            )
        if not step.has_windows and _should_have_windows(self._base.config, self.layers):
            raise self._refused("its layers have a sliding window that they do not ask for")
        at = 0
        for key, _, count in chunks:
            part = hidden[at : at + count]
            made[key].append(self.logits(part) if self.is_last else part.float())
            at += count

    def _refused(self, why: str) -> UnsupportedModel:
        return UnsupportedModel(f"architecture {self.spec.architecture!r} is not supported: {why}")


def _should_have_windows(config: Any, layers: range) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return "sliding_attention" in kinds[layers.start : layers.stop]
    return bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)


def _load(folder: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Any:
    """Load transformers' causal model with its weights. Raises UnsupportedModel, before a weight is read where it can be told."""
    kind: Any = getattr(transformers, spec.architecture)
    if not getattr(kind, "_supports_attention_backend", False):
        raise UnsupportedModel(
            f"architecture {spec.architecture!r} is not supported: transformers' own code for it has its attention built in"
        )
    AttentionInterface.register(_NAME, _attend)
    try:
        model, report = kind.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=_NAME,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UnsupportedModel(f"transformers cannot load {folder}: {error}") from None
    if missing := sorted(report["missing_keys"]):
        raise UnsupportedModel(f"the checkpoint in {folder} lacks {', '.join(missing[:3])}")
    return model.to(device).eval()


def _with_given(causal: Any, given: _Given) -> Any:
    """Return the causal model with `given` in place of its layers: its head, and all that it does with logits, without a second
    copy."""
    head = copy(causal)
    head._modules = {**causal._modules, causal.base_model_prefix: given}
    return head


@dataclass(frozen=True, slots=True)
class _Example:
    """A sequence, and what transformers itself computes of it."""

    given: Tensor
    """Tokens (T,), or hidden (T, hidden_size) from the stage before."""
    made: Tensor
    """Logits (T, vocab_size), or hidden (T, hidden_size) for the next stage."""


def _examples(causal: Any, spec: ModelSpec, layers: range) -> dict[str, _Example]:
    """Let transformers compute two sequences, wherever the model lies."""
    rng = torch.Generator().manual_seed(0)
    found: dict[str, _Example] = {}
    for key in "ab":
        length = max(start + count for other, start, count in _CHECKED if other == key)
        tokens = torch.randint(spec.vocab_size, (length,), generator=rng).to(causal.device)
        with _own_attention(causal):
            out = causal(input_ids=tokens[None], use_cache=False, output_hidden_states=True)
        found[key] = _Example(
            out.hidden_states[layers.start][0] if layers.start else tokens,
            out.hidden_states[layers.stop][0] if layers.stop < spec.num_layers else out.logits[0],
        )
    return found


@contextmanager
def _as_current(step: _Step) -> Generator[None]:
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


@contextmanager
def _own_attention(causal: Any) -> Generator[None]:
    causal.set_attn_implementation("eager")
    try:
        yield
    finally:
        causal.set_attn_implementation(_NAME)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: query (1, H, T, D), key and value (1, Hkv, T, D) -> (1, T, H, D of values).

    Keys and values go into the pool as they are: a rotation by nothing stores them."""
    del dropout, others
    step = _STEP.get()
    layer, (_, num_heads, num_tokens, head_dim) = int(module.layer_idx), query.shape
    step.layers.append(layer)
    step.has_windows |= bool(sliding_window)
    kv_layer = step.kv[layer - step.first]
    if key.shape[1] != kv_layer.shape[2] or head_dim != step.head_dim:
        raise UnsupportedModel(
            f"layer {layer} has keys of {key.shape[1]} heads of {head_dim} numbers, and by config.json {kv_layer.shape[2]} of "
            f"{step.head_dim}"
        )
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise UnsupportedModel(f"layer {layer} attends by a mask of its own, or to later tokens")
    value_dim = value.shape[-1]
    stored = nn.functional.pad(value, (0, head_dim - value_dim)) if value_dim < head_dim else value
    rows = torch.cat([part[0].transpose(0, 1).flatten(1) for part in (query, key, stored)], -1)
    cos, sin = _no_rotation(step.meta, rows, head_dim)
    queries = step.ops.rope_write_kv(rows, cos, sin, None, kv_layer, step.meta)
    if step.on_layer is not None:
        step.on_layer(layer)
    scale = head_dim**-0.5 if scaling is None else scaling
    sinks = None if s_aux is None else s_aux.float()
    out = step.ops.paged_attention(
        queries, kv_layer, step.meta, scale, sliding_window or 0, softcap or 0.0, sinks
    )
    return out.view(1, num_tokens, num_heads, head_dim)[..., :value_dim], None


def _no_rotation(meta: AttentionMeta, like: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (T, head_dim) of no rotation, the same in all layers."""
    key = ("no rotation", like.dtype)
    if key not in meta.cache:
        shape = (len(like), head_dim)
        meta.cache[key] = like.new_ones(shape), like.new_zeros(shape)
    return meta.cache[key]
