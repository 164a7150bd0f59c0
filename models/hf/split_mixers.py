"""Layers with recurrent states in a step of packed tokens: each takes the rows of one sequence after those of another.

All else of the model computes the rows of all sequences at once. A layer's module is found by who updates the states of
transformers' cache; it is called as the model calls it, with the part of each argument that belongs to a sequence."""

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from kernels.ops import AttentionMeta, KVLayer
from models.hf.cache_store import CacheStore
from models.hf.cache_tree import UnknownCache, plan_of
from models.hf.sequence_layers import PROBED, CachedForward, copied, drafts_of
from models.spec.foreign_cache import ForeignCache

_Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(slots=True)
class _Sequence:
    """Rows of a step that belong to one sequence."""

    known: slice
    drafted: slice
    cache: Any


@dataclass(slots=True)
class _Step:
    num_rows: int
    sequences: list[_Sequence]
    drafts: list[tuple[int, int, _Call]] = field(default_factory=list[tuple[int, int, _Call]])
    """The sequence, the module and its arguments, for what is computed of draft tokens."""


class SplitMixers:
    def __init__(self, causal: Any, place: ForeignCache) -> None:
        """Take the place of the modules that keep states. Raises UnknownCache where others keep something."""
        self._forward = forward = CachedForward(causal)
        steps = forward.probe(torch.ones(sum(PROBED), dtype=torch.int64, device=causal.device))
        self._store = CacheStore(plan_of(steps), steps[-1][1], place)
        self._originals: list[Callable[..., Any]] = []
        self._step: _Step | None = None
        if forward.has_attributes:
            raise UnknownCache("its modules keep states in attributes")
        _check_places(steps[-1][1], self._store)
        self._modules = _keepers(forward)
        for module in self._modules:
            self._originals.append(module.forward)
            module.forward = _Split(self, len(self._originals) - 1)

    def give_back(self) -> None:
        """Let the modules be as they were."""
        for module in self._modules:
            del module.forward

    @contextmanager
    def over(self, x: Tensor, kv: Sequence[KVLayer], meta: AttentionMeta) -> Generator[None]:
        """Compute a step within, from the sequences' states on. They are written behind known tokens."""
        assert meta.states is not None
        drafts = drafts_of(meta)
        sequences: list[_Sequence] = []
        for seq, count in enumerate(drafts):
            start, end = meta.query_starts[seq], meta.query_starts[seq + 1]
            cache = self._cache(kv, meta.context_lens[seq] - (end - start), meta.states.blocks[seq])
            sequences.append(_Sequence(slice(start, end - count), slice(end - count, end), cache))
        self._step = step = _Step(len(x), sequences)
        try:
            yield
        finally:
            self._step = None
        for seq, sequence in enumerate(sequences):
            self._store.save_states(sequence.cache, kv, meta.states.blocks[seq])
        if step.drafts:
            meta.states.kept.append(_TakeIn(self, step, kv, meta))

    def split(self, number: int, call: _Call) -> Any:
        """Call a module for each sequence of the step, or as it is where there is none."""
        original, step = self._originals[number], self._step
        if step is None:
            return original(*call[0], **call[1])
        made: list[Any] = []
        for seq, sequence in enumerate(step.sequences):
            made.append(self.called(number, _part(call, step.num_rows, sequence.known), sequence.cache))
            if sequence.drafted.stop > sequence.drafted.start:
                part = _part(call, step.num_rows, sequence.drafted)
                step.drafts.append((seq, number, part))
                made.append(self.called(number, part, _twin(sequence.cache, original)))
        return _joined(made)

    def called(self, number: int, call: _Call, cache: Any) -> Any:
        args, named = call
        return self._originals[number](*args, **{**named, self._forward.cache_name: cache["cache"]})

    def take_in(
        self, step: _Step, kv: Sequence[KVLayer], meta: AttentionMeta, right: AttentionMeta, taken: Tensor
    ) -> None:
        """Bring states behind the draft tokens that were right: `kernels.ops.TakeIn`, of a step."""
        drafts = drafts_of(meta)
        owners = [seq for seq, count in enumerate(drafts) for _ in range(count)]
        assert right.states is not None
        at = 0
        for count, blocks in zip(right.query_lens, right.states.blocks, strict=True):
            seq = owners[int(taken[at])]
            at += count
            cache = self._cache(kv, meta.context_lens[seq] - drafts[seq], blocks)
            for owner, number, call in step.drafts:
                if owner == seq:
                    self.called(number, _part(call, drafts[seq], slice(0, count)), cache)
            self._store.save_states(cache, kv, blocks)

    def _cache(self, kv: Sequence[KVLayer], num_tokens: int, blocks: Tensor) -> Any:
        if num_tokens:
            return self._store.with_states(kv, num_tokens, blocks)
        return {"cache": self._forward.fresh()}


@dataclass(frozen=True, slots=True)
class _Split:
    """A module's forward pass."""

    mixers: SplitMixers
    number: int

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.mixers.split(self.number, (args, named))


@dataclass(frozen=True, slots=True)
class _TakeIn:
    """`kernels.ops.TakeIn`."""

    mixers: SplitMixers
    step: _Step
    kv: Sequence[KVLayer]
    meta: AttentionMeta

    def __call__(self, right: AttentionMeta, taken: Tensor) -> None:
        self.mixers.take_in(self.step, self.kv, self.meta, right, taken)


def _check_places(held: Any, store: CacheStore) -> None:
    layers = getattr(held["cache"], "layers", [])
    for leaf in store.plan.fixed:
        owner = layers[int(leaf.path[2])] if leaf.path[:2] == ("cache", "layers") else None
        if not isinstance(owner, LinearAttentionCacheLayerMixin):
            raise UnknownCache(
                f"its cache keeps {'.'.join(map(str, leaf.path))} for others than recurrent layers"
            )


def _keepers(forward: CachedForward) -> list[Any]:
    """Return the modules that update states, in their order."""
    stack: list[Any] = []
    found: dict[Any, None] = {}

    def note(update: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **named: Any) -> Any:
            found[stack[-1]] = None
            return update(*args, **named)

        return noting

    modules = [
        module
        for module in forward.causal.base_model.modules()
        if forward.cache_name in inspect.signature(module.forward).parameters
    ]
    hooks = [module.register_forward_pre_hook(lambda m, _: stack.append(m)) for module in modules]
    hooks += [module.register_forward_hook(lambda *_: stack.pop() and None) for module in modules]
    names = ("update_conv_state", "update_recurrent_state")
    updates = [getattr(LinearAttentionLayer, name) for name in names]
    try:
        for name, update in zip(names, updates, strict=True):
            setattr(LinearAttentionLayer, name, note(update))
        forward(torch.ones(PROBED[0], dtype=torch.int64, device=forward.causal.device), 0, None)
    finally:
        for name, update in zip(names, updates, strict=True):
            setattr(LinearAttentionLayer, name, update)
        for hook in hooks:
            hook.remove()
    return list(found)


def _twin(held: Any, original: Callable[..., Any]) -> Any:
    """Return a cache whose layer may be changed without the other's."""
    layer = int(original.__self__.layer_idx)  # type: ignore[attr-defined]
    twin = copy(held["cache"])
    twin.layers = list(twin.layers)
    twin.layers[layer] = copied(twin.layers[layer])
    return {"cache": twin}


def _part(call: _Call, num_rows: int, rows: slice) -> _Call:
    def part(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(part, value))  # type: ignore[arg-type]
        has_rows = isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == num_rows
        return value[:, rows] if has_rows else value

    args, named = call
    return tuple(map(part, args)), {name: part(value) for name, value in named.items()}


def _joined(made: Sequence[Any]) -> Any:
    if isinstance(made[0], Tensor):
        return torch.cat([*made], 1)
    if isinstance(made[0], tuple):
        return tuple(_joined(parts) for parts in zip(*made, strict=True))
    return made[0]
