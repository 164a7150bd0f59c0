"""How large an instance's KV pools are: as large as the memory model leaves room for, or as the configuration says."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from core.config.adapter_config import AdapterConfig
from core.config.cluster_config import EngineConfig, ModelConfig
from core.cost.memory_model import DeviceMemory, RankNeeds, Sharing, check_fit, gib, kv_room
from core.errors import ConfigError
from core.kv import PAGE_BYTES, KVLayout, KVShard, RankPool, lay_out, memory_bytes, num_blocks_for
from engine.planning.whole_prompts import encoder_config
from engine.sizing.adapter_needs import with_adapters
from engine.sizing.devices import choose_device, host_cores, memory_of
from engine.sizing.draft_size import DraftSize, Target, size_draft
from engine.sizing.image_needs import beside_images
from engine.sizing.kv_part_limits import check_kv_parts
from engine.sizing.memory_needs import needs_of
from engine.sizing.model_dims import check_mesh, shards_of
from engine.sizing.recurrent_limits import check_recurrent
from engine.sizing.stored_weights import stored_as
from kernels.cpu.prepacked import WeightFormat
from models.families.table import read_spec
from models.formats.shared_weights import place_of
from models.formats.tensor_files import count_weights
from models.lora.adapter import Adapter, read_adapters
from models.registry import check_load_format, choose_dtype, choose_kv_dtype, choose_weights
from models.spec.model_spec import Implementation, LoadFormat, ModelSpec
from parallel.mesh import ONE_RANK, Mesh

_log = logging.getLogger(__name__)
_NO_SLOTS = AdapterConfig()
_MOST_THREADS = "BATON_MAX_THREADS"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The memory that an instance's ranks find on their devices."""

    devices: tuple[DeviceMemory, ...]
    """The memory of each rank's device."""
    num_sharers: int = 1
    """The number of ranks, of this instance and of others, that share one device's memory evenly."""
    most_pool_bytes: int | None = None
    """The most that each rank's pool may take of the memory in which it is shared with other processes."""
    on_device: bool = False
    """Whether pools lie in that memory, a GPU's."""
    card_share: float = 1.0
    """The part of its GPU that an instance has, where one of another role has the rest."""
    num_alike: int = 1
    """The instances, this one among them, that would share a host's copy of their weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    shard: KVShard
    num_blocks: int
    max_context_tokens: int
    dtype: str
    """The dtype that the model computes in."""
    weights: WeightFormat
    """How ranks on CPUs keep matrices."""
    load_format: LoadFormat = "auto"
    packed_cache: str = "none"
    implementation: Implementation = "baton"
    """Where ranks have their weights from."""
    adapters: Mapping[str, str] = field(default_factory=dict[str, str])
    """The folders of adapters, by name."""
    adapter_keys: frozenset[str] = frozenset()
    """How requests name them."""
    pools: tuple[RankPool, ...]
    """The pools of the instance's ranks."""
    needs: tuple[RankNeeds, ...]
    """What each rank needs beside its pool."""
    num_threads: int
    """Compute threads of each rank."""
    draft: DraftSize | None = None
    """What makes draft tokens beside it, with as many blocks."""
    expert_share: float = 0.0
    """Which part of a layer's routed experts a token uses; 0: there are none."""
    encodes: bool = False
    """The model is an encoder, whose blocks take no memory."""
    hands_over: bool = False
    """Whether it computes prompts for other instances."""
    on_device: bool = False
    """Whether pools lie in GPUs' memory. With several ranks each is then in a memory of its own, from number 1 on. Without
    `dp`, where steps may be captured, each has a block more, which is nobody's."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the instance's own memory: a page at the least, since nobody can map less."""
        return max(PAGE_BYTES, memory_bytes(self.pools))

    def summary(self) -> str:
        """Return a sentence for people: how much KV there is, and what the fullest rank has."""
        pool, needs = max(
            zip(self.pools, self.needs, strict=True), key=lambda rank: rank[0].num_bytes + rank[1].num_bytes
        )
        return (
            f"{self.num_blocks * self.shard.layout.block_size:,} tokens of KV: the fullest rank has {gib(pool.num_bytes)} beside "
            f"{gib(needs.weight_bytes)} of weights and {gib(needs.step_bytes)} for the largest step"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Described:
    """A model according to its description and the configuration, before any memory is looked at."""

    spec: ModelSpec
    engine: EngineConfig
    adapters: Sequence[Adapter]
    max_context_tokens: int
    device: torch.device
    dtype: str
    weights: WeightFormat

    def layout(self) -> KVLayout:
        """Return how KV is stored. Raises ConfigError."""
        spec, engine = self.spec, self.engine
        kept_as = choose_kv_dtype(
            spec, self.dtype, self.weights, self.device, deterministic=engine.deterministic
        )
        return _stored_as(engine.kv_dtype, spec.kv_layout(engine.block_size, kept_as))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """What an instance's ranks need, and the memory that they find for their pools."""

    engine: EngineConfig
    mesh: Mesh
    shards: Sequence[KVShard]
    needs: Sequence[RankNeeds]
    found: RankMemory
    sharing: Sequence[Sharing]
    draft_block_bytes: Sequence[int]
    """What each rank keeps of a block beside its pool."""
    max_context_tokens: int
    on_device: bool

    @property
    def groups(self) -> list[int]:
        """The group of ranks, which has blocks of its own, of each rank."""
        return [self.mesh.place(rank).dp for rank in range(self.mesh.size)]

    @property
    def num_idle(self) -> int:
        """The number of each pool's blocks that are nobody's."""
        return int(self.on_device and self.mesh.dp == 1)

    def num_blocks(self) -> int:
        """Return the blocks of each group of ranks. Raises ConfigError."""
        if self.engine.num_blocks or self.engine.kv_bytes:
            return self._asked_blocks()
        return max(self.shards[0].layout.state_blocks + 2, self._blocks_with_room() - self.num_idle)

    def lay_out(self, num_blocks: int, memories: Sequence[int]) -> tuple[RankPool, ...]:
        """Return the ranks' pools. Raises ConfigError where they do not fit."""
        size = self.mesh.size
        own_memories = range(1, size + 1) if self.on_device and size > 1 else memories
        pools = lay_out(self.shards, num_blocks + self.num_idle, self.groups, own_memories)
        for memory, need, pool, shared, own in zip(
            self.found.devices, self.needs, pools, self.sharing, self.draft_block_bytes, strict=True
        ):
            kv_bytes = pool.num_bytes + own * pool.num_blocks
            check_fit(memory, need, kv_bytes, self.engine.memory_utilization, shared)
        return pools

    def _asked_blocks(self) -> int:
        """Return the blocks of each group of ranks, as the configuration says. Raises ConfigError."""
        engine, mesh = self.engine, self.mesh
        block_bytes = sum(
            shard.pool_bytes(1) for shard, dp in zip(self.shards, self.groups, strict=True) if dp == 0
        )
        num_blocks = (engine.num_blocks or engine.kv_bytes // block_bytes) // mesh.dp
        if num_blocks < self.shards[0].layout.state_blocks + 2:
            said = (
                f"num_blocks of {engine.num_blocks}"
                if engine.num_blocks
                else f"kv_bytes of {engine.kv_bytes}"
            )
            raise ConfigError(
                f"engine.{said} holds {num_blocks} blocks of {block_bytes} bytes"
                + (f" for each of {mesh.dp} groups of ranks" if mesh.dp > 1 else "")
                + _for_states(self.shards[0].layout)
            )
        return num_blocks

    def _blocks_with_room(self) -> int:
        """Return the blocks of each group of ranks for which the fullest rank has room. It is at least two, with which
        `check_fit` then says what is missing, and at most what all sequences need at their longest. Mostly they are shorter, and
        prefixes have the rest."""
        engine, state_blocks = self.engine, self.shards[0].layout.state_blocks
        longest = num_blocks_for(self.max_context_tokens, engine.block_size)
        most = engine.max_num_seqs * (state_blocks + longest)
        for shard, need, memory, shared, own in zip(
            self.shards, self.needs, self.found.devices, self.sharing, self.draft_block_bytes, strict=True
        ):
            if not shard.num_layers:
                break  # an encoder's blocks take no memory
            room = kv_room(memory, need, engine.memory_utilization, shared)
            if self.found.most_pool_bytes is not None:
                # A draft model's KV lies beside the memory that bounds the pool.
                most = min(most, self.found.most_pool_bytes // shard.pool_bytes(1))
            most = min(most, room // (shard.pool_bytes(1) + own))
        return max(most, state_blocks + 2)


def size_pool(
    folder: Path,
    model: ModelConfig,
    engine: EngineConfig,
    mesh: Mesh = ONE_RANK,
    *,
    role: str = "instance",
    num_spare: int = 0,
    device: torch.device | None = None,
    memories: Sequence[int] = (),
    found: RankMemory | None = None,
    slots: AdapterConfig = _NO_SLOTS,
) -> PoolSize:
    """Work out how many blocks an instance has, from the model's description alone. `device` is what its ranks compute on, where
    this process has another one. `memories` says on which of its hosts each rank is. `found` is the memory that they have there;
    None means that all of this process's device is theirs. `slots` are for adapters that come later. Raises ConfigError, also
    where weights, the largest step and the pool do not fit."""
    described = _describe(folder, model, engine, device)
    check_mesh(described.spec, mesh, role, num_spare)
    target = Target(
        spec=described.spec,
        folder=folder,
        config=model,
        shards=shards_of(described.spec, mesh, described.layout()),
        mesh=mesh,
        num_spare=num_spare,
        role=role,
        device=described.device,
    )
    needs = _needs_of(described, target, slots)
    draft = size_draft(target, described.engine)
    if draft is not None:
        needs = draft.beside(needs)
    found = found or _found_here(described.device, mesh.size)
    room = _room_of(described, target, needs, found, draft, memories or (0,) * mesh.size)
    size = _sized(described, target, room, draft, memories)
    _log.info("%s of %s on %s: %s", role, target.spec.architecture, found.devices[0].name, size.summary())
    return size


def _describe(
    folder: Path, model: ModelConfig, engine: EngineConfig, device: torch.device | None
) -> _Described:
    """Return what the model is. Raises ConfigError and UnsupportedModel for what cannot be served."""
    spec = read_spec(folder, model.implementation)
    check_load_format(spec, model.load_format)
    check_recurrent(spec, engine)
    check_kv_parts(spec, engine)
    adapters = read_adapters(model.adapters, spec)
    max_context_tokens = model.max_context_tokens or spec.max_context_tokens
    if spec.encodes:
        engine = encoder_config(engine, max_context_tokens)
    device = device or choose_device(engine.device)
    return _Described(
        spec=spec,
        engine=engine,
        adapters=adapters,
        max_context_tokens=max_context_tokens,
        device=device,
        dtype=choose_dtype(spec, model.dtype, device),
        weights=choose_weights(
            spec, model.dtype, model.quantization, device, deterministic=engine.deterministic
        ),
    )


def _needs_of(described: _Described, target: Target, slots: AdapterConfig) -> Sequence[RankNeeds]:
    """Return what each rank needs beside its pool and a draft model. Raises ConfigError."""
    spec, engine, mesh, dtype = described.spec, described.engine, target.mesh, described.dtype
    needs = needs_of(
        spec,
        engine,
        mesh,
        stored_as(spec, dtype, described.weights, described.device, deterministic=engine.deterministic),
        context_tokens=described.max_context_tokens,
        num_spare=target.num_spare,
        num_weights=spec.num_weights or (count_weights(target.folder) if spec.encodes else 0),
    )
    needs = with_adapters(
        needs,
        described.adapters,
        spec,
        mesh,
        slots=slots,
        dtype=dtype,
        max_batch_tokens=engine.max_batch_tokens,
    )
    return beside_images(needs, spec, target.folder, mesh, dtype, engine)


def _room_of(
    described: _Described,
    target: Target,
    needs: Sequence[RankNeeds],
    found: RankMemory,
    draft: DraftSize | None,
    hosts: Sequence[int],
) -> _Room:
    is_shared = shares_weights(target.config, target.folder, described.spec, described.device)
    num_alike = found.num_alike if is_shared else 1
    return _Room(
        engine=described.engine,
        mesh=target.mesh,
        shards=target.shards,
        needs=needs,
        found=found,
        sharing=[
            Sharing(found.num_sharers, hosts.count(host), found.card_share, num_alike) for host in hosts
        ],
        draft_block_bytes=_draft_bytes(draft, target.mesh),
        max_context_tokens=described.max_context_tokens,
        on_device=found.on_device and not described.spec.encodes,
    )


def _sized(
    described: _Described, target: Target, room: _Room, draft: DraftSize | None, memories: Sequence[int]
) -> PoolSize:
    """Return the size that `room` leaves. Raises ConfigError."""
    spec, num_blocks = described.spec, room.num_blocks()
    return PoolSize(
        shard=KVShard.whole(described.layout()),
        num_blocks=num_blocks * target.mesh.dp,
        max_context_tokens=described.max_context_tokens,
        dtype=described.dtype,
        weights=described.weights,
        load_format=target.config.load_format,
        packed_cache=target.config.packed_cache,
        implementation=spec.implementation,
        adapters=target.config.adapters,
        adapter_keys=frozenset(adapter.key for adapter in described.adapters),
        pools=room.lay_out(num_blocks, memories),
        needs=tuple(room.needs),
        num_threads=described.engine.num_threads or _threads(room.found),
        draft=draft,
        expert_share=spec.expert_share,
        encodes=spec.encodes,
        hands_over=target.role in ("prefill", "both"),
        on_device=room.on_device,
    )


def shares_weights(model: ModelConfig, folder: Path, spec: ModelSpec, device: torch.device) -> bool:
    """Return whether instances on one host have one copy of the model's weights."""
    is_ours = spec.implementation == "baton" and not spec.encodes and model.load_format == "auto"
    return device.type == "cpu" and is_ours and place_of(model.packed_cache, folder) is not None


def _found_here(device: torch.device, num_ranks: int) -> RankMemory:
    """Return the memory of ranks that have all of this process's device."""
    found = memory_of(device)
    return RankMemory(devices=(found,) * num_ranks, num_sharers=num_ranks, on_device=not found.is_host)


def _draft_bytes(draft: DraftSize | None, mesh: Mesh) -> list[int]:
    """Return what each rank keeps of a block beside its pool."""
    return [shard.pool_bytes(1) for shard in draft.shards] if draft else [0] * mesh.size


def _threads(found: RankMemory) -> int:
    """Return the threads of each rank. Ranks on one host share its cores. A rank on a GPU only launches kernels. Raises
    ConfigError."""
    if not found.devices[0].is_host:
        return 1
    most = os.environ.get(_MOST_THREADS, "") or str(host_cores())
    if not (most.isascii() and most.isdigit() and int(most)):
        raise ConfigError(f"{_MOST_THREADS} is {most!r}: it must be a number of threads, from 1 on")
    return max(1, min(int(most), host_cores() // found.num_sharers))


def _for_states(layout: KVLayout) -> str:
    if not layout.state_blocks:
        return ""
    return f"; each sequence's recurrent state takes {layout.state_blocks}, beside those of its tokens"


def _stored_as(kv_dtype: str, layout: KVLayout) -> KVLayout:
    """Return how ranks keep the model."""
    if kv_dtype == "auto":
        return layout
    return replace(layout, dtype="float8_e4m3fn" if kv_dtype == "float8" else kv_dtype, scales="vector")
