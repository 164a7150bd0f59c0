"""Where transformers' cache of a sequence is stored in the paged pool.

What grows with tokens is in the tokens' slots: of layers of one shape a key and a value for each head, in the pool's layers;
otherwise all numbers of a token one after the other. States are in the sequence's first blocks, byte after byte."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.errors import UnsupportedModel
from kernels.ops import KVLayer
from models.hf.cache_tree import CachePlan, Path, aligned, changed, leaves_of
from models.spec.foreign_cache import ForeignCache


@dataclass(frozen=True, slots=True)
class CacheStore:
    plan: CachePlan
    template: Any
    """A cache that has been used, of which only what does not change is read."""
    place: ForeignCache

    def restored(
        self, kv: Sequence[KVLayer], table: Tensor, num_tokens: int, state_blocks: Tensor | None
    ) -> Any:
        """Return the cache of a sequence of which so many tokens are in the pool. `table` has the blocks of its tokens."""
        return self._filled(kv, num_tokens, state_blocks, self._grown(kv, table, num_tokens))

    def with_states(self, kv: Sequence[KVLayer], num_tokens: int, state_blocks: Tensor) -> Any:
        """Return the same, but for what grows with tokens, which is of another sequence."""
        return self._filled(kv, num_tokens, state_blocks, {})

    def save(self, cache: Any, kv: Sequence[KVLayer], slots: Tensor, state_blocks: Tensor | None) -> None:
        """Store what the last tokens have added, whose slots are given, and the states where there are blocks for them."""
        leaves, size = leaves_of(cache), plain(kv[0]).shape[3]
        block, offset = slots // size, slots % size
        for layer, rows in zip(kv, self._rows(leaves, len(slots), plain(kv[0])), strict=False):
            plain(layer)[block, :, :, offset] = rows
        if state_blocks is not None:
            self.save_states(cache, kv, state_blocks)

    def save_states(self, cache: Any, kv: Sequence[KVLayer], state_blocks: Tensor) -> None:
        if self.plan.fixed:
            leaves = leaves_of(cache)
            self._write(kv, state_blocks, [leaves[leaf.path] for leaf in self.plan.fixed])

    def _filled(
        self,
        kv: Sequence[KVLayer],
        num_tokens: int,
        state_blocks: Tensor | None,
        grown: Mapping[Path, Tensor],
    ) -> Any:
        found: dict[Path, Any] = {path: num_tokens + off for path, off in self.plan.counts.items()}
        known = leaves_of(self.template)
        for path, part in grown.items():
            found[path] = part.to(known[path].dtype)
        if self.plan.fixed:
            assert state_blocks is not None, "a model with states has blocks for them"
            found.update(self._states(self._read(kv, state_blocks), known))
        return changed(self.template, lambda path, leaf: found.get(path, leaf))

    def _grown(self, kv: Sequence[KVLayer], table: Tensor, num_tokens: int) -> dict[Path, Tensor]:
        growing = self.plan.growing
        if not growing:
            return {}
        if not self.place.is_whole:
            found: dict[Path, Tensor] = {}
            for at, (keys, values) in enumerate(zip(growing[::2], growing[1::2], strict=True)):
                rows = _slots_of(kv[at], table, _first(keys.most, num_tokens), num_tokens)
                for plane, leaf in enumerate((keys, values)):
                    found[leaf.path] = rows[:, plane, :, : leaf.shape[2]].transpose(0, 1)[None]
            return found
        rows = _slots_of(kv[0], table, 0, num_tokens).flatten(1)[:, : self.plan.numbers]
        parts = rows.split([leaf.numbers for leaf in growing], 1)
        return {
            leaf.path: part[_first(leaf.most, num_tokens) :].unflatten(1, leaf.shape).movedim(0, leaf.axis)
            for leaf, part in zip(growing, parts, strict=True)
        }

    def _rows(self, leaves: Mapping[Path, Tensor], count: int, like: Tensor) -> list[Tensor]:
        """Return what the last `count` tokens have in each of the pool's layers: (count, planes, heads, head_dim)."""
        growing, dim = self.plan.growing, like.shape[4]
        new = [
            leaves[leaf.path].narrow(leaf.axis, leaves[leaf.path].shape[leaf.axis] - count, count).movedim(leaf.axis, 0)
            for leaf in growing
        ]  # fmt: skip
        if not self.place.is_whole:
            planes = [torch.nn.functional.pad(part[:, 0], (0, dim - part.shape[3])) for part in new]
            pairs = zip(planes[::2], planes[1::2], strict=True)
            return [torch.stack(pair, 1).to(like.dtype) for pair in pairs]
        if not new:
            return []
        flat = torch.cat([part.flatten(1).to(like.dtype) for part in new], 1)
        padded = torch.nn.functional.pad(flat, (0, 2 * dim - flat.shape[1]))
        return [padded.view(count, 2, 1, dim)]

    def _states(self, stored: Tensor, known: Mapping[Path, Any]) -> dict[Path, Tensor]:
        found: dict[Path, Tensor] = {}
        at = 0
        for leaf in self.plan.fixed:
            like: Tensor = known[leaf.path]
            found[leaf.path] = stored[at : at + leaf.num_bytes].clone().view(like.dtype).view(like.shape)
            at += aligned(leaf.num_bytes)
        return found

    def _read(self, kv: Sequence[KVLayer], blocks: Tensor) -> Tensor:
        """Return the bytes of a sequence's states."""
        count = self._num_slots(plain(kv[0]))
        parts = [_slots_of(layer, blocks, 0, count).flatten().view(torch.uint8) for layer in kv]
        return torch.cat(parts)

    def _write(self, kv: Sequence[KVLayer], blocks: Tensor, states: Sequence[Tensor]) -> None:
        first = plain(kv[0])
        count, (_, planes, heads, size, dim) = self._num_slots(first), first.shape
        per_layer = count * planes * heads * dim * first.element_size()
        flat = torch.zeros(per_layer * len(kv), dtype=torch.uint8, device=first.device)
        at = 0
        for state, leaf in zip(states, self.plan.fixed, strict=True):
            flat[at : at + leaf.num_bytes] = state.contiguous().flatten().view(torch.uint8)
            at += aligned(leaf.num_bytes)
        slots = torch.arange(count, device=first.device)
        block, offset = blocks[slots // size], slots % size
        for layer, part in zip(kv, flat.split(per_layer), strict=True):
            plain(layer)[block, :, :, offset] = part.view(first.dtype).view(count, planes, heads, dim)

    def _num_slots(self, layer: Tensor) -> int:
        slot_bytes = layer.shape[1] * self.place.num_kv_heads * layer.shape[4] * layer.element_size()
        return self.place.num_slots(slot_bytes)


def plain(layer: KVLayer) -> Tensor:
    """Raises UnsupportedModel for a pool that stores less than the model computes."""
    if not isinstance(layer, Tensor):
        raise UnsupportedModel(
            "transformers attends in it, which reads no KV of 8 bits: set engine.kv_dtype to auto"
        )
    return layer


def _first(most: int, num_tokens: int) -> int:
    return max(0, num_tokens - most) if most else 0


def _slots_of(layer: KVLayer, table: Tensor, first: int, end: int) -> Tensor:
    """Return slots [first, end) of the blocks in `table`: (slots, planes, heads, head_dim)."""
    pool = plain(layer)
    slots = torch.arange(first, end, device=pool.device)
    return pool[table[slots // pool.shape[3]], :, :, slots % pool.shape[3]]
