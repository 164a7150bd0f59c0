"""A model whose layers transformers computes, over Baton's paged pool.

Layers that attend through transformers' interface, and keep keys and values alone, compute all sequences of a step at once
(`packed_layers.py`). Others compute one sequence after the other, with transformers' own cache (`sequence_layers.py`). Either way
such a model is batched, chunked, prefix-cached and handed over like any other.

As it is loaded a model is compared with what transformers itself computes: one that keeps or reads something else than what is
in the pool is refused, not served wrongly."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from core.errors import UnsupportedModel
from kernels.collectives import ONE_RANK, Collectives
from kernels.ops import AttentionMeta, ExpertWeights, KVLayer, Ops, StateBlocks
from models.hf.cache_tree import UnknownCache
from models.hf.linear import pack_products
from models.hf.loading import CHECKED, Example, Given, Reached, examples_of, load_causal, with_given
from models.hf.packed_layers import PackedLayers
from models.hf.sequence_layers import CachedForward, SequenceLayers
from models.hf.tp_cuts import cut, keep_stage
from models.lora.low_rank import no_adapters
from models.pooling.readout import NO_READOUT, Readout
from models.spec.foreign_cache import ForeignCache
from models.spec.model_spec import ModelSpec

_CHECK_BLOCK, _CHECK_BLOCKS = 4, 8
_NOT_RUN: Final = (
    AttributeError,
    TypeError,
    KeyError,
    IndexError,
    RuntimeError,
    ValueError,
    NotImplementedError,
)
"""What transformers' code raises where it is called in a way that it does not know."""


class Layers(Protocol):
    """How the layers compute a step."""

    how: str
    """As the middle of a sentence."""

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        kv: Sequence[KVLayer],
        meta: AttentionMeta,
        on_layer: Callable[[int], None] | None,
    ) -> Tensor:
        """`models.causal_model.CausalModel.forward`."""
        ...

    def checked(self, x: Tensor, positions: Tensor, kv: Sequence[KVLayer], meta: AttentionMeta) -> Tensor:
        """Return the same. Raises UnsupportedModel for what its result would not show."""
        ...

    def give_back(self) -> None:
        """Let the model be as it was, for another way of computing it."""
        ...


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
        self._num_ranks = spec.num_kv_heads // _size(collectives.share(spec.num_kv_heads))
        is_stage = len(layers) < spec.num_layers
        host = torch.device("cpu")
        self.causal = load_causal(folder, spec, dtype, host if self._num_ranks > 1 or is_stage else device)
        self.adapters = no_adapters()
        self.bytes_read = sum(tensor.nbytes for tensor in self.causal.state_dict().values())
        on_read()
        try:
            reached = Reached(self.causal)
            examples = examples_of(self.causal, spec, layers)
            reached.stop()
            reached.drop_others()
            if is_stage:
                keep_stage(self.causal, spec.stages, layers)
            if self._num_ranks > 1:
                cut(self.causal, self.causal.tp_plan, collectives)
            self.causal.to(device)
            pack_products(self.causal, ops, dtype, reached.only_read())
        except _NOT_RUN as error:
            raise self._refused(f"transformers' code for it does not run: {error}") from error
        self._given = Given(self.causal.base_model)
        self._head = with_given(self.causal, self._given)
        self._layers = self._chosen(examples)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        kv: Sequence[KVLayer],
        meta: AttentionMeta,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        return self._layers(x, positions, kv, meta, on_layer)

    def logits(self, hidden: Tensor) -> Tensor:
        self._given.hidden = hidden[None]
        return self._head(input_ids=hidden.new_zeros(1, len(hidden), dtype=torch.int64)).logits[0].float()

    def _chosen(self, examples: Mapping[str, Example]) -> Layers:
        """Return the first way of computing the layers that gives what transformers itself does. Raises UnsupportedModel."""
        problems: list[str] = []
        for make in self._ways():
            layers = None
            try:
                layers = make()
                self._compare(layers, examples)
                return layers
            except (UnsupportedModel, UnknownCache) as error:
                problems.append(str(error))
            except _NOT_RUN as error:
                problems.append(f"transformers' code for it does not run so: {type(error).__name__}: {error}")
            if layers is not None:
                layers.give_back()
        raise self._refused("; ".join(dict.fromkeys(problems)))

    def _ways(self) -> Iterator[Callable[[], Layers]]:
        spec, causal = self.spec, self.causal
        if spec.cache is None or spec.cache.attends is not None:
            layers = self.layers if spec.cache is None else spec.cache.attends or ()
            yield partial(PackedLayers, causal, self.ops, spec.head_dim, layers, spec.cache)
        if len(self.layers) < spec.num_layers:
            return
        place = spec.cache or ForeignCache(
            num_layers=spec.num_layers, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim
        )
        for by_token, told in product((False, True), repeat=2):
            yield partial(_one_by_one, causal, place, token_by_token=by_token, with_positions=told)

    def _compare(self, layers: Layers, examples: Mapping[str, Example]) -> None:
        """Compute two sequences in chunks through a pool, and compare what comes with what transformers' own attention and
        products make of them. Raises UnsupportedModel."""
        device = self.expert_load.device
        ours: dict[str, list[Tensor]] = {key: [] for key in examples}
        layout = self.spec.kv_layout(_CHECK_BLOCK, str(self.dtype).removeprefix("torch."))
        heads, num_blocks = (
            layout.num_kv_heads // self._num_ranks or 1,
            _CHECK_BLOCKS + 2 * layout.state_blocks,
        )
        shape = (num_blocks, 2, heads, _CHECK_BLOCK, layout.head_dim)
        num_layers = layout.num_layers if self.spec.cache else len(self.layers)
        pool = [torch.zeros(shape, dtype=self.dtype, device=device) for _ in range(num_layers)]
        for first in range(0, len(CHECKED), 2):
            self._compute(layers, CHECKED[first : first + 2], examples, pool, ours)
        for key, parts in ours.items():
            theirs = examples[key].made.to(device).float()
            off = float((torch.cat(parts) - theirs).norm() / theirs.norm().clamp_min(1e-9))
            if not off <= self._tolerance:
                raise UnsupportedModel(
                    f"{layers.how} its results are {off:.0%} off what transformers computes without one"
                )

    def _compute(
        self,
        layers: Layers,
        chunks: Sequence[tuple[str, int, int]],
        examples: Mapping[str, Example],
        pool: Sequence[Tensor],
        made: Mapping[str, list[Tensor]],
    ) -> None:
        positions = np.concatenate([np.arange(start, start + count) for _, start, count in chunks])
        meta, device = self._meta(chunks, len(pool[0]) - _CHECK_BLOCKS, pool[0].device), pool[0].device
        packed = torch.cat([examples[key].given[start : start + count] for key, start, count in chunks])
        hidden = layers.checked(packed.to(device), torch.from_numpy(positions).to(device), pool, meta)
        at = 0
        for key, _, count in chunks:
            part = hidden[at : at + count]
            made[key].append(self.logits(part) if self.is_last else part.float())
            at += count

    def _meta(
        self, chunks: Sequence[tuple[str, int, int]], num_states: int, device: torch.device
    ) -> AttentionMeta:
        """Return where the chunks' tokens lie. Behind their blocks are `num_states` blocks of states."""
        tables = {"a": np.arange(0, 4), "b": np.arange(4, 8)}
        slots = [
            tables[key][np.arange(start, start + count) // _CHECK_BLOCK] * _CHECK_BLOCK
            + np.arange(start, start + count) % _CHECK_BLOCK
            for key, start, count in chunks
        ]
        states = None
        if num_states:
            blocks = torch.arange(_CHECK_BLOCKS, _CHECK_BLOCKS + num_states, device=device).view(2, -1)
            begins = torch.tensor([start == 0 for _, start, _ in chunks], device=device)
            states = StateBlocks(blocks, begins)
        return AttentionMeta.build(
            [count for _, _, count in chunks],
            [start + count for _, start, count in chunks],
            [tables[key] for key, _, _ in chunks],
            np.concatenate(slots),
            device,
            states,
        )

    def _refused(self, why: str) -> UnsupportedModel:
        return UnsupportedModel(f"architecture {self.spec.architecture!r} is not supported: {why}")


def _one_by_one(
    causal: Any, place: ForeignCache, *, token_by_token: bool, with_positions: bool
) -> SequenceLayers:
    forward = CachedForward(causal, with_positions=with_positions)
    return SequenceLayers(forward, place, token_by_token=token_by_token)


def _size(span: slice) -> int:
    return span.stop - span.start
