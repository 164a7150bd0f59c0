"""What makes an instance's draft tokens: what it takes of its ranks' memory, and what it cannot be used with. From descriptions
alone, no weight is read."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from core.config.cluster_config import EngineConfig, ModelConfig
from core.config.draft_config import draft_path, proposes
from core.cost.memory_model import RankNeeds
from core.errors import ConfigError
from core.kv import DTYPE_BYTES, KVShard
from engine.sizing.head_setup import HeadKind, HeadSetup
from engine.sizing.memory_needs import needs_of
from engine.sizing.stored_weights import Stored, stored_as
from kernels.cpu.prepacked import WeightFormat
from models.drafting.eagle import read_eagle
from models.drafting.mtp import check_mtp, with_mtp_layer
from models.families.table import read_spec
from models.files.hub import resolve
from models.registry import choose_dtype, choose_weights
from models.spec.kv_places import has_states
from models.spec.model_spec import ModelSpec
from models.text.vocabulary import check_same_vocabulary
from parallel.mesh import ONE_RANK, Mesh

CATCH_UP_TOKENS = 512
"""Tokens that the draft model reads before one step, so that what it has not seen does not hold the step up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSize:
    """A draft model, or a head of the model, beside a target."""

    folder: Path
    dtype: str
    """The dtype that it computes in."""
    weights: WeightFormat
    shards: tuple[KVShard, ...]
    """What a pool beside each rank's own keeps, in blocks of as many tokens."""
    needs: tuple[RankNeeds, ...]
    """What each rank needs besides."""
    head: HeadKind | None = None
    """None where it is a model of its own."""
    taps: tuple[int, ...] = ()
    """The target's layers before which it reads the state."""

    def setup_of(self, rank: int) -> HeadSetup | None:
        """Return how a rank loads its part of a head; None for a model of its own."""
        if self.head is None:
            return None
        return HeadSetup(
            kind=self.head,
            folder=str(self.folder),
            weights=self.weights,
            shard=self.shards[rank],
            taps=self.taps,
        )

    def beside(self, targets: Sequence[RankNeeds]) -> list[RankNeeds]:
        """Return the needs of ranks with both, which take turns."""
        return [
            RankNeeds(
                weight_bytes=target.weight_bytes + own.weight_bytes,
                step_bytes=max(target.step_bytes, own.step_bytes),
            )
            for target, own in zip(targets, self.needs, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The target model, as the drafter sees it."""

    spec: ModelSpec
    folder: Path
    config: ModelConfig
    shards: tuple[KVShard, ...]
    """What each of its ranks keeps."""
    mesh: Mesh
    num_spare: int
    """As in `parallel.plans.check`."""
    role: str
    device: torch.device


def size_draft(target: Target, engine: EngineConfig) -> DraftSize | None:
    """Return the size of what `engine.speculate` asks for beside the target, if ranks make draft tokens. Raises ConfigError where
    they cannot be used together."""
    if not proposes(engine):
        return None
    kind, path = engine.speculate.partition(":")[0], draft_path(engine)
    _check_target(target, engine, kind)
    match kind:
        case "mtp":
            return _size_mtp(target, engine)
        case "eagle":
            return _size_eagle(target, resolve(path), engine)
        case _:
            return _size_model(target, resolve(path), engine)


def _size_model(target: Target, folder: Path, engine: EngineConfig) -> DraftSize:
    spec = read_spec(folder)
    _check_draft(spec, engine)
    check_same_vocabulary(folder, target.folder, spec.vocab_size)
    dtype = choose_dtype(spec, target.config.dtype, target.device)
    weights, stored = _unquantised(spec, target, dtype)
    needs = needs_of(
        spec,
        engine.model_copy(update={"max_batch_tokens": CATCH_UP_TOKENS}),
        ONE_RANK,
        stored,
        context_tokens=spec.max_context_tokens,
        num_weights=spec.num_weights,
    )
    return DraftSize(
        folder=folder,
        dtype=dtype,
        weights=weights,
        shards=(KVShard.whole(spec.kv_layout(engine.block_size, dtype)),),
        needs=tuple(needs),
    )


def _size_mtp(target: Target, engine: EngineConfig) -> DraftSize:
    spec, config = target.spec, target.config
    check_mtp(spec, target.folder, config.load_format)
    dtype = choose_dtype(spec, config.dtype, target.device)
    weights = choose_weights(
        spec, config.dtype, config.quantization, target.device, deterministic=engine.deterministic
    )
    stored = stored_as(spec, dtype, weights, target.device, deterministic=engine.deterministic)
    longer, alone = (
        _needs(each, target, engine, stored, target.mesh) for each in (with_mtp_layer(spec), spec)
    )
    joining = int(2 * spec.hidden_size**2 * stored.matrix)
    # The target's states, and those joined to embeddings, live until the layer has read them.
    rows = engine.max_batch_tokens * 3 * spec.hidden_size * DTYPE_BYTES[dtype]
    return DraftSize(
        folder=target.folder,
        dtype=dtype,
        weights=weights,
        shards=tuple(
            replace(shard, layout=replace(shard.layout, num_layers=1), layers=(0, 1))
            for shard in target.shards
        ),
        needs=tuple(
            RankNeeds(
                weight_bytes=both.weight_bytes - own.weight_bytes + joining, step_bytes=both.step_bytes + rows
            )
            for both, own in zip(longer, alone, strict=True)
        ),
        head="mtp",
    )


def _size_eagle(target: Target, folder: Path, engine: EngineConfig) -> DraftSize:
    head = read_eagle(folder, target.spec)
    layer, size = head.layer, head.layer.hidden_size
    dtype = choose_dtype(target.spec, target.config.dtype, target.device)  # it reads the target's states
    weights, stored = _unquantised(layer, target, dtype)
    [needs] = _needs(layer, target, engine, stored, ONE_RANK)
    # Attention reads rows of twice the size. The only embedding is that of all of the target's tokens, if it has one.
    within = len(head.taps) * head.target_size
    more = size * (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim + within * size
    tokens = target.spec.vocab_size * head.has_embedding - layer.vocab_size
    rows = engine.max_batch_tokens * (2 * within + 3 * size) * DTYPE_BYTES[dtype]
    own = RankNeeds(
        weight_bytes=needs.weight_bytes + int(more * stored.matrix) + tokens * size * stored.other,
        step_bytes=needs.step_bytes + rows,
    )
    return DraftSize(
        folder=folder,
        dtype=dtype,
        weights=weights,
        shards=(KVShard.whole(layer.kv_layout(engine.block_size, dtype)),) * target.mesh.size,
        needs=(own,) * target.mesh.size,
        head="eagle",
        taps=head.taps,
    )


def _unquantised(spec: ModelSpec, target: Target, dtype: str) -> tuple[WeightFormat, Stored]:
    """Return the format of matrices that came with the drafter, and how a rank keeps them. Draft tokens need not be
    deterministic."""
    weights = choose_weights(spec, target.config.dtype, "none", target.device, deterministic=False)
    return weights, stored_as(spec, dtype, weights, target.device, deterministic=False)


def _needs(
    spec: ModelSpec, target: Target, engine: EngineConfig, stored: Stored, mesh: Mesh
) -> list[RankNeeds]:
    """Return what each rank needs to compute the target's own steps by `spec`."""
    context = target.config.max_context_tokens or target.spec.max_context_tokens
    return needs_of(spec, engine, mesh, stored, context_tokens=context, num_spare=target.num_spare)


def _check_target(target: Target, engine: EngineConfig, kind: str) -> None:
    asked, spec, mesh, role = (
        f"engine.speculate is {engine.speculate}, but",
        target.spec,
        target.mesh,
        target.role,
    )
    if spec.encodes:
        raise ConfigError(
            f"{asked} {spec.architecture} is an encoder, which samples no tokens to propose. Leave it at none"
        )
    if kind == "draft" and mesh.size > 1:
        raise ConfigError(
            f"{asked} {role} has {mesh}: a draft model serves instances of one rank. Leave {role}.tp, pp, dp and ep at 1, or "
            "draft by ngram"
        )
    if mesh.pp > 1 or mesh.dp > 1:
        raise ConfigError(
            f"{asked} {role} has {mesh}: a head serves instances of which all ranks compute all tokens. Leave {role}.pp and dp "
            "at 1, or draft by ngram"
        )
    if kind == "eagle" and spec.implementation == "transformers":
        raise ConfigError(
            f"{asked} transformers computes {spec.architecture}, which keeps no states of its layers for a head. Draft by ngram "
            "or a draft model"
        )
    if kind == "eagle" and spec.streams is not None:
        raise ConfigError(
            f"{asked} {spec.architecture} has {spec.streams.num_streams} residual streams, and a head reads one. Draft by ngram "
            "or a draft model"
        )


def _check_draft(spec: ModelSpec, engine: EngineConfig) -> None:
    if spec.encodes or has_states(spec):
        what = (
            "is an encoder"
            if spec.encodes
            else "has recurrent layers, whose state wrong draft tokens would spoil"
        )
        raise ConfigError(
            f"engine.speculate is {engine.speculate}, but {spec.architecture} {what}. Use a decoder whose layers all attend"
        )
