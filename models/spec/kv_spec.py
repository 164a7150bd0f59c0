"""Keys and values of a model whose layers differ in them: in the number and the size of their heads, and in whose they are.

The pool has one shape for all of its layers: vectors of the size that divides all heads' sizes, and as many heads of them as the
largest layer needs. A smaller layer takes a part of a pool's layer, whose other parts later layers of its kind take; where its
heads lie among the pool's is said by `HeadPlaces`. A layer without keys and values of its own reads an earlier layer's."""

import math
from dataclasses import dataclass
from functools import cached_property

from kernels.head_places import HeadPlaces
from models.spec.stage_starts import stage_starts


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerHeads:
    num_kv_heads: int
    head_dim: int

    @property
    def size(self) -> int:
        """Numbers of one token's keys."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """`misfit` says whether the layers fit such a pool."""

    heads: tuple[LayerHeads, ...]
    """What each layer's keys and values have."""
    sources: tuple[int, ...]
    """For each layer the one whose keys and values it reads: itself, or an earlier one."""
    keys_are_values: tuple[bool, ...]
    """For each layer whether its values are what its keys are before their norm and rotation."""

    @property
    def misfit(self) -> str:
        """Return why the layers do not fit a pool of one shape, as the end of a sentence; empty where they do."""
        kinds = sorted(set(self.heads), key=lambda kind: kind.size)
        for kind in kinds:
            if kinds[-1].size % kind.size or kind.num_kv_heads % self.cut_heads:
                return (
                    f"layers of {kind.num_kv_heads} KV heads of {kind.head_dim} share no pool with layers of "
                    f"{kinds[-1].num_kv_heads} of {kinds[-1].head_dim}: sizes and numbers of heads must divide each other"
                )
        return ""

    @cached_property
    def vector_dim(self) -> int:
        """The size of the pool's heads."""
        return math.gcd(*(heads.head_dim for heads in self.heads))

    @cached_property
    def pool_heads(self) -> int:
        return max(heads.size for heads in self.heads) // self.vector_dim

    @cached_property
    def cut_heads(self) -> int:
        """The most parts that ranks may cut the heads of all layers into."""
        return min(heads.num_kv_heads for heads in self.heads)

    def owns(self, layer: int) -> bool:
        return self.sources[layer] == layer

    def projections(self, layer: int, num_heads: int) -> dict[str, int]:
        """Return the outputs of each projection that a layer has before its attention of so many heads."""
        heads = self.heads[layer]
        found = {"q": num_heads * heads.head_dim}
        if not self.owns(layer):
            return found
        return found | dict.fromkeys("k" if self.keys_are_values[layer] else "kv", heads.size)

    @cached_property
    def places(self) -> tuple[HeadPlaces | None, ...]:
        """For each layer which heads of its pool layer it has; None where they are all, as they are."""
        used = dict[LayerHeads, int]()
        found: list[HeadPlaces | None] = []
        for layer, heads in enumerate(self.heads):
            if not self.owns(layer):
                found.append(found[self.sources[layer]])
                continue
            part = used.get(heads, 0)
            used[heads] = (part + 1) % self._num_parts(heads)
            width = heads.head_dim // self.vector_dim
            step = self.pool_heads // heads.num_kv_heads
            found.append(None if step == 1 else HeadPlaces(part * width, step, width))
        return tuple(found)

    @cached_property
    def written(self) -> tuple[int, ...]:
        """For each layer which of the pool's layers its keys and values are in. These are numbered in the order in which they are
        complete."""
        groups = self._groups
        ends = sorted({max(group) for group in groups.values()})
        of_layer = {layer: ends.index(max(group)) for group in groups.values() for layer in group}
        return tuple(of_layer[source] for source in self.sources)

    @property
    def writers(self) -> tuple[int, ...]:
        """The layers with keys and values of their own."""
        return tuple(filter(self.owns, range(len(self.sources))))

    @property
    def num_kv_layers(self) -> int:
        """The layers of the pool."""
        return max(self.written) + 1

    @property
    def stage_starts(self) -> tuple[int, ...]:
        """The layers that a stage of a pipeline may begin with."""
        return stage_starts(self.written)

    def kv_layers(self, first: int, end: int) -> tuple[int, int]:
        """Return the range of the pool's layers that a stage with layers [first, end) has."""
        held = self.written[first:end]
        return min(held), max(held) + 1

    def _num_parts(self, heads: LayerHeads) -> int:
        """Return how many layers of this kind share a layer of the pool."""
        return self.pool_heads * self.vector_dim // heads.size

    @cached_property
    def _groups(self) -> dict[tuple[LayerHeads, int], list[int]]:
        """The layers that share each of the pool's layers."""
        counts = dict[LayerHeads, int]()
        groups = dict[tuple[LayerHeads, int], list[int]]()
        for layer in self.writers:
            heads = self.heads[layer]
            number = counts.get(heads, 0)
            counts[heads] = number + 1
            groups.setdefault((heads, number // self._num_parts(heads)), []).append(layer)
        return groups
