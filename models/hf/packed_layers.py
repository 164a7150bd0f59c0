"""Layers of transformers over packed tokens: all sequences of a step in one row, with Baton's attention over the paged pool.

transformers' modules ask for attention through an interface, by the name that the model's configuration has. Baton's is
registered there: it stores keys and values in the pool and attends over it. Positions tell sequences apart."""

import contextvars
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from core.errors import UnsupportedModel
from kernels.ops import AttentionMeta, KVLayer, Ops
from models.hf.split_mixers import SplitMixers
from models.spec.foreign_cache import ForeignCache

NAME: Final = "baton_paged"


@dataclass(slots=True)
class _Step:
    """One forward pass, as its attention layers see it."""

    kv: Sequence[KVLayer]
    meta: AttentionMeta
    on_layer: Callable[[int], None] | None
    ops: Ops
    head_dim: int
    first: int
    """The number of the stage's first layer in the pool of the whole model."""
    keys: list[ref[Tensor]] = field(default_factory=list[ref[Tensor]])
    """The keys of each of the pool's layers, as the layers give them. Those that come again are shared by several layers."""
    layers: list[int] = field(default_factory=list[int])
    """Indices of the layers that have asked for attention so far, in the order in which they did."""
    has_windows: bool = False
    """Whether a layer has asked for a sliding window."""

    def place_of(self, key: Tensor) -> int:
        """Return which of the pool's layers has these keys: an earlier layer's, or the next."""
        return next((at for at, own in enumerate(self.keys) if own() is key), len(self.keys))

    def stored(self, key: Tensor) -> None:
        """Note that the pool has these keys, with their values."""
        place = self.place_of(key)
        if place < len(self.keys):
            return
        self.keys.append(ref(key))
        if self.on_layer is not None:
            self.on_layer(self.first + place)


_STEP: contextvars.ContextVar[_Step] = contextvars.ContextVar("step")


class PackedLayers:
    """A `models.hf.transformers_model.Layers`."""

    how = "over a paged cache"

    def __init__(
        self, causal: Any, ops: Ops, head_dim: int, layers: Sequence[int], place: ForeignCache | None
    ) -> None:
        """`layers` are those of this stage that attend. `place`: of the states that others keep, if any do. Raises
        UnknownCache."""
        self._base, self._ops, self._head_dim, self._layers = causal.base_model, ops, head_dim, layers
        self._first = layers[0] if place is None else 0
        has_states = place is not None and place.state_bytes > 0
        self._mixers = SplitMixers(causal, place) if place is not None and has_states else None
        self._takes_positions = (
            self._mixers is None or "position_ids" in signature(self._base.forward).parameters
        )
        AttentionInterface.register(NAME, attend)
        causal.set_attn_implementation(NAME)

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        kv: Sequence[KVLayer],
        meta: AttentionMeta,
        on_layer: Callable[[int], None] | None,
    ) -> Tensor:
        return self._run(x, positions, self._step(kv, meta, on_layer))

    def checked(self, x: Tensor, positions: Tensor, kv: Sequence[KVLayer], meta: AttentionMeta) -> Tensor:
        """Return the same. Raises UnsupportedModel where the layers do not ask for attention as they should."""
        step = self._step(kv, meta, None)
        hidden = self._run(x, positions, step)
        if step.layers != list(self._layers):
            raise UnsupportedModel(
                f"its {len(self._layers)} layers asked for attention {len(step.layers)} times, or not in their order"
            )
        if not step.has_windows and _should_have_windows(self._base.config, self._layers):
            raise UnsupportedModel("its layers have a sliding window that they do not ask for")
        return hidden

    def give_back(self) -> None:
        """Let the model be as it was."""
        if self._mixers is not None:
            self._mixers.give_back()

    def _step(
        self, kv: Sequence[KVLayer], meta: AttentionMeta, on_layer: Callable[[int], None] | None
    ) -> _Step:
        return _Step(kv, meta, on_layer, self._ops, self._head_dim, self._first)

    def _run(self, x: Tensor, positions: Tensor, step: _Step) -> Tensor:
        if self._mixers is None:
            return self._computed(x, positions, step)
        told, step.on_layer = step.on_layer, None
        with self._mixers.over(x, step.kv, step.meta):
            hidden = self._computed(x, positions, step)
        if told is not None:
            for layer in range(len(step.kv)):
                told(layer)
        return hidden

    def _computed(self, x: Tensor, positions: Tensor, step: _Step) -> Tensor:
        given = {"inputs_embeds" if x.is_floating_point() else "input_ids": x[None]}
        if self._takes_positions:
            given["position_ids"] = positions[None]
        with _as_current(step):
            out = self._base(**given, use_cache=False)
        return out.last_hidden_state[0]


@contextmanager
def _as_current(step: _Step) -> Generator[None]:
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def _should_have_windows(config: Any, layers: Sequence[int]) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return any("sliding" in kinds[layer] for layer in layers)
    return bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)


def attend(
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
    kv_layer = step.kv[step.place_of(key)]
    if key.shape[1] != kv_layer.shape[2] or head_dim != step.head_dim:
        raise UnsupportedModel(
            f"layer {layer} has keys of {key.shape[1]} heads of {head_dim} numbers, and by config.json {kv_layer.shape[2]} of "
            f"{step.head_dim}"
        )
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise UnsupportedModel(f"layer {layer} attends by a mask of its own, or to later tokens")
    rows = _rows(query, key, value)
    cos, sin = _no_rotation(step.meta, rows, head_dim)
    queries = step.ops.rope_write_kv(rows, cos, sin, None, kv_layer, step.meta)
    step.stored(key)
    scale = head_dim**-0.5 if scaling is None else scaling
    sinks = None if s_aux is None else s_aux.float()
    out = step.ops.paged_attention(
        queries, kv_layer, step.meta, scale, sliding_window or 0, softcap or 0.0, sinks
    )
    return out.view(1, num_tokens, num_heads, head_dim)[..., : value.shape[-1]], None


def _rows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return all that a token has in one row, (T, ..). Values of fewer dimensions than keys are filled up."""
    surplus = key.shape[-1] - value.shape[-1]
    stored = nn.functional.pad(value, (0, surplus)) if surplus else value
    return torch.cat([part[0].transpose(0, 1).flatten(1) for part in (query, key, stored)], -1)


def _no_rotation(meta: AttentionMeta, like: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (T, head_dim) of no rotation, the same in all layers."""
    key = ("no rotation", like.dtype)
    if key not in meta.cache:
        shape = (len(like), head_dim)
        meta.cache[key] = like.new_ones(shape), like.new_zeros(shape)
    return meta.cache[key]
