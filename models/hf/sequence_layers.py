"""Layers of transformers over one sequence after the other, with transformers' own attention and its own cache.

The cache of each sequence is put together from the pool, and what a step adds to it is stored there. So layers may keep whatever
their cache has: recurrent states, keys of indexers, keys and values that several layers share. It takes more time than packed
tokens do: each step reads all that the pool has of a sequence."""

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from transformers import DynamicCache, masking_utils

from kernels.ops import AttentionMeta, KVLayer
from models.hf.cache_store import CacheStore
from models.hf.cache_tree import UnknownCache, changed, keep_all, plan_of
from models.spec.foreign_cache import ForeignCache

CACHE_NAMES: Final = ("cache", "past_key_values", "cache_params", "state")
_WINDOWED: Final = ("sliding_window_causal_mask_function", "chunked_causal_mask_function")
PROBED: Final = (3, 1, 2)
"""Tokens of the steps that show what a cache keeps."""


class CachedForward:
    """A model's layers, which take a cache and return it. Some keep states in attributes of their modules as well."""

    def __init__(self, causal: Any, *, with_positions: bool = False) -> None:
        """`with_positions`: tokens come with their positions, and otherwise the layers count those in the cache. Raises
        UnknownCache where the layers take no cache, or no positions."""
        names = inspect.signature(causal.base_model.forward).parameters
        if any(one.kind is one.VAR_POSITIONAL for one in names.values()):
            names = inspect.signature(causal.forward).parameters  # the layers are wrapped
        if with_positions and "position_ids" not in names:
            raise UnknownCache("its layers take no positions")
        found = next((name for name in CACHE_NAMES if name in names), None)
        if found is None:
            raise UnknownCache("its layers take no cache")
        self.causal, self.cache_name = causal, found
        self._with_positions = with_positions
        self._attributes: list[tuple[Any, str, Any]] = []
        """Modules, names of their attributes, and what these are before a sequence begins."""

    def __call__(self, tokens: Tensor, first: int, held: Any) -> tuple[Tensor, Any]:
        """Tokens (T,), the first one's position, what is held of those before it or None -> hidden (T, hidden_size), held."""
        for at, (module, name, initial) in enumerate(self._attributes):
            setattr(module, name, initial if held is None else held["attributes"][at])
        told: dict[str, Any] = {self.cache_name: self.fresh() if held is None else held["cache"]}
        if self._with_positions:
            told["position_ids"] = torch.arange(first, first + len(tokens), device=tokens.device)[None]
        out = self.causal.base_model(input_ids=tokens[None], use_cache=True, **told)
        attributes = [getattr(module, name) for module, name, _ in self._attributes]
        cache = out.get(self.cache_name)
        # Some return none: what they were given has been changed.
        cache = told[self.cache_name] if cache is None else cache
        return out.last_hidden_state[0], {"cache": cache, "attributes": attributes}

    def probe(self, tokens: Tensor) -> list[tuple[int, Any]]:
        """Compute some tokens in steps. Returns how many there were behind each step, and a copy of what was held there."""
        before = _attributes(self.causal.base_model)
        self(tokens[: PROBED[0]], 0, None)
        after = _attributes(self.causal.base_model)
        self._attributes = [
            (module, name, before.get((module, name)))
            for (module, name), value in after.items()
            if isinstance(value, Tensor) and before.get((module, name)) is not value
        ]
        found: list[tuple[int, Any]] = []
        count, held = 0, None
        for more in PROBED:
            _, held = self(tokens[count : count + more], count, held)
            count += more
            found.append((count, copied(held)))
        return found

    @property
    def has_attributes(self) -> bool:
        """Whether modules keep states in attributes, as far as `probe` has seen."""
        return bool(self._attributes)

    def fresh(self) -> Any:
        """Return a cache for a sequence that begins; None where the layers make their own."""
        if not self.causal._supports_default_dynamic_cache():
            return None
        return keep_all(DynamicCache(config=self.causal.config.get_text_config(decoder=True)))


def _attributes(base: Any) -> dict[tuple[Any, str], Any]:
    """Return all plain attributes of modules that are tensors, or may become some."""
    return {
        (module, name): value
        for module in base.modules()
        for name, value in vars(module).items()
        if value is None or isinstance(value, Tensor)
    }


def copied(cache: Any) -> Any:
    """Return a cache, or a part of one, with tensors of its own."""
    return changed(cache, lambda _, leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)


class SequenceLayers:
    """A `models.hf.transformers_model.Layers`."""

    how = "with its cache in the pool"

    def __init__(self, forward: CachedForward, place: ForeignCache, *, token_by_token: bool) -> None:
        """`token_by_token`: the layers take several tokens at once only where a sequence begins. Raises UnknownCache."""
        causal = forward.causal
        causal.set_attn_implementation("sdpa" if causal._supports_sdpa else "eager")
        self._forward, self._token_by_token = forward, token_by_token
        with _masks_of_windows() as asked:
            steps = forward.probe(torch.ones(sum(PROBED), dtype=torch.int64, device=causal.device))
        plan = plan_of(steps)
        if not asked and any(leaf.most for leaf in plan.growing):
            raise UnknownCache("its cache keeps a window of tokens that its layers do not ask for")
        self._store = CacheStore(plan, steps[-1][1], place)

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        kv: Sequence[KVLayer],
        meta: AttentionMeta,
        on_layer: Callable[[int], None] | None,
    ) -> Tensor:
        del positions
        drafts = drafts_of(meta)
        made = [self._sequence(x, kv, meta, seq, drafts[seq]) for seq in range(len(meta.query_lens))]
        if any(drafts) and meta.states is not None:
            meta.states.kept.append(_Drafted(self, x.clone(), kv, meta))
        if on_layer is not None:
            for layer in range(len(kv)):
                on_layer(layer)
        return torch.cat(made)

    def checked(self, x: Tensor, positions: Tensor, kv: Sequence[KVLayer], meta: AttentionMeta) -> Tensor:
        """Return the same: nothing is asked for that could be missing."""
        return self(x, positions, kv, meta, None)

    def give_back(self) -> None:
        """Do nothing: the model is as it was."""

    def take_in(
        self, tokens: Tensor, kv: Sequence[KVLayer], table: Tensor, first: int, blocks: Tensor
    ) -> None:
        """Bring a sequence's states, which are behind its first tokens, behind these ones."""
        _, cache = self._go_on(tokens, first, self._store.restored(kv, table, first, blocks))
        self._store.save(cache, kv, table[:0], blocks)

    def _sequence(
        self, x: Tensor, kv: Sequence[KVLayer], meta: AttentionMeta, seq: int, num_drafts: int
    ) -> Tensor:
        """Compute the rows of one sequence. States in the pool are then behind all rows but draft tokens."""
        start, end = meta.query_starts[seq], meta.query_starts[seq + 1]
        first, known = meta.context_lens[seq] - (end - start), end - num_drafts
        table = meta.block_tables[seq].to(x.device)
        blocks = None if meta.states is None else meta.states.blocks[seq]
        cache = self._store.restored(kv, table, first, blocks) if first else None
        hidden, cache = self._go_on(x[start:known], first, cache)
        self._store.save(cache, kv, meta.slots[start:known], blocks)
        if not num_drafts:
            return hidden
        drafted, cache = self._go_on(x[known:end], first + known - start, cache)
        self._store.save(cache, kv, meta.slots[known:end], None)
        return torch.cat([hidden, drafted])

    def _go_on(self, tokens: Tensor, first: int, cache: Any) -> tuple[Tensor, Any]:
        if cache is None or not self._token_by_token:
            return self._forward(tokens, first, cache)
        made: list[Tensor] = []
        for at in range(len(tokens)):
            hidden, cache = self._forward(tokens[at : at + 1], first + at, cache)
            made.append(hidden)
        return torch.cat(made), cache


@dataclass(frozen=True, slots=True)
class _Drafted:
    """What a step leaves to be taken in of its draft tokens: `kernels.ops.TakeIn`."""

    layers: SequenceLayers
    x: Tensor
    kv: Sequence[KVLayer]
    meta: AttentionMeta

    def __call__(self, right: AttentionMeta, taken: Tensor) -> None:
        drafts = drafts_of(self.meta)
        owners = [seq for seq, count in enumerate(drafts) for _ in range(count)]
        assert right.states is not None
        at = 0
        for count, blocks in zip(right.query_lens, right.states.blocks, strict=True):
            seq = owners[int(taken[at])]
            at += count
            row = self.meta.query_starts[seq + 1] - drafts[seq]
            first = self.meta.context_lens[seq] - drafts[seq]
            table = self.meta.block_tables[seq].to(self.x.device)
            self.layers.take_in(self.x[row : row + count], self.kv, table, first, blocks)


@contextmanager
def _masks_of_windows() -> Generator[list[int]]:
    """Note the windows of the masks that are made within. Short texts would not show that there are none."""
    asked: list[int] = []
    own = {name: getattr(masking_utils, name) for name in _WINDOWED}

    def noting(make: Callable[..., Any], size: int, *others: Any, **named: Any) -> Any:
        asked.append(size)
        return make(size, *others, **named)

    try:
        for name, make in own.items():
            setattr(masking_utils, name, partial(noting, make))
        yield asked
    finally:
        for name, make in own.items():
            setattr(masking_utils, name, make)


def drafts_of(meta: AttentionMeta) -> Sequence[int]:
    """Return how many of each sequence's rows, the last ones, are draft tokens."""
    given = () if meta.states is None else meta.states.num_drafts
    return given or (0,) * len(meta.query_lens)
