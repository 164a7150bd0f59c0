"""How large an instance's KV pools are: as large as the memory law leaves room for, or as the configuration says."""

import logging
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
from engine.sizing.devices import choose_device, host_cores, keeps_pool, memory_of
from engine.sizing.draft_size import DraftSize, Target, size_draft
from engine.sizing.kv_part_limits import check_kv_parts
from engine.sizing.memory_needs import needs_of, stored_as
from engine.sizing.model_dims import check_mesh, shards_of
from engine.sizing.picture_needs import beside_pictures
from engine.sizing.recurrent_limits import check_recurrent
from kernels.cpu.prepacked import WeightFormat
from models.families.table import read_spec
from models.formats.checkpoint import count_weights
from models.lora.adapter import read_adapters
from models.registry import check_load_format, choose_dtype, choose_kv_dtype, choose_weights
from models.spec.model_spec import Implementation, LoadFormat
from parallel.mesh import ONE_RANK, Mesh

_log = logging.getLogger(__name__)
_NO_SLOTS = AdapterConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The memory that an instance's ranks find on their devices."""

    devices: tuple[DeviceMemory, ...]
    """The memory of each rank's device."""
    num_sharers: int = 1
    """The number of ranks, of this instance and of others, that share one device's memory evenly."""
    most_pool_bytes: int | None = None
    """The most that each rank's pool may take of memory beside the device's, to which it is copied or in which it is shared."""
    on_device: bool = False
    """Whether pools lie in that memory, a GPU's, and nowhere else."""
    card_share: float = 1.0
    """The part of its GPU that an instance has, where one of another role has the rest."""


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
    """What makes guesses beside it, with as many blocks."""
    expert_share: float = 0.0
    """Which part of a layer's routed experts a token draws; 0: there are none."""
    encodes: bool = False
    """The model is an encoder, whose blocks take no memory."""
    hands_over: bool = False
    """Whether it computes prompts for other instances."""
    on_device: bool = False
    """Whether pools lie in GPUs' memory alone. With several ranks each is then in a memory of its own, from number 1 on. Without
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
    spec = read_spec(folder, model.implementation)
    check_load_format(spec, model.load_format)
    check_recurrent(spec, engine)
    check_kv_parts(spec, engine)
    adapters = read_adapters(model.adapters, spec)
    max_context_tokens = model.max_context_tokens or spec.max_context_tokens
    if spec.encodes:
        engine = encoder_config(engine, max_context_tokens)
    device = device or choose_device(engine.device)
    dtype = choose_dtype(spec, model.dtype, device)
    weights = choose_weights(spec, model.dtype, model.quantization, engine.deterministic, device)
    check_mesh(spec, mesh, role, num_spare)
    kept_as = choose_kv_dtype(spec, dtype, weights, engine.deterministic, device)
    layout = _stored_as(engine.kv_dtype, spec.kv_layout(engine.block_size, kept_as))
    shards = shards_of(spec, mesh, layout)
    groups = [mesh.place(rank).dp for rank in range(mesh.size)]
    stored = stored_as(spec, dtype, weights, device, engine.deterministic)
    needs = needs_of(
        spec,
        engine,
        mesh,
        stored,
        context_tokens=max_context_tokens,
        num_spare=num_spare,
        num_weights=count_weights(folder) if spec.implementation == "transformers" else 0,
    )
    needs = with_adapters(
        needs, adapters, spec, mesh, slots=slots, dtype=dtype, max_batch_tokens=engine.max_batch_tokens
    )
    needs = beside_pictures(needs, spec, folder, mesh, dtype, engine)
    target = Target(
        spec=spec,
        folder=folder,
        config=model,
        shards=shards,
        mesh=mesh,
        num_spare=num_spare,
        role=role,
        device=device,
    )
    draft = size_draft(target, engine)
    needs = draft.beside(needs) if draft else needs
    beside = _draft_bytes(draft, mesh)
    found = found or _found_here(device, mesh.size)
    on_device = found.on_device and not spec.encodes
    num_idle = int(on_device and mesh.dp == 1)
    hosts = memories or (0,) * mesh.size
    sharing = [Sharing(found.num_sharers, hosts.count(host), found.card_share) for host in hosts]
    if engine.num_blocks or engine.kv_bytes:
        num_blocks = _asked_blocks(engine, shards, groups, mesh)
    else:
        num_blocks = _blocks_with_room(
            engine,
            shards,
            needs,
            found,
            sharing=sharing,
            max_context_tokens=max_context_tokens,
            draft_block_bytes=beside,
        )
        num_blocks = max(layout.state_blocks + 2, num_blocks - num_idle)
    own_memories = range(1, mesh.size + 1) if on_device and mesh.size > 1 else memories
    pools = lay_out(shards, num_blocks + num_idle, groups, own_memories)
    for memory, need, pool, shared, own in zip(found.devices, needs, pools, sharing, beside, strict=True):
        kv_bytes = pool.num_bytes + own * pool.num_blocks
        check_fit(memory, need, kv_bytes, engine.memory_utilization, shared)
    size = PoolSize(
        shard=KVShard.whole(layout),
        num_blocks=num_blocks * mesh.dp,
        max_context_tokens=max_context_tokens,
        dtype=dtype,
        weights=weights,
        load_format=model.load_format,
        implementation=spec.implementation,
        adapters=model.adapters,
        adapter_keys=frozenset(adapter.key for adapter in adapters),
        pools=pools,
        needs=tuple(needs),
        num_threads=engine.num_threads or _threads(found),
        draft=draft,
        expert_share=spec.expert_share,
        encodes=spec.encodes,
        hands_over=role in ("prefill", "both"),
        on_device=on_device,
    )
    _log.info("%s of %s on %s: %s", role, spec.architecture, found.devices[0].name, size.summary())
    return size


def _found_here(device: torch.device, num_ranks: int) -> RankMemory:
    """Return the memory of ranks that have all of this process's device."""
    found = memory_of(device)
    on_device = keeps_pool(found.is_host, num_ranks)
    return RankMemory(devices=(found,) * num_ranks, num_sharers=num_ranks, on_device=on_device)


def _draft_bytes(draft: DraftSize | None, mesh: Mesh) -> list[int]:
    """Return what each rank keeps of a block beside its pool."""
    return [shard.pool_bytes(1) for shard in draft.shards] if draft else [0] * mesh.size


def _threads(found: RankMemory) -> int:
    """Return the threads of each rank. Ranks on one host share its cores. A rank on a GPU only launches kernels."""
    return max(1, host_cores() // found.num_sharers) if found.devices[0].is_host else 1


def _asked_blocks(engine: EngineConfig, shards: Sequence[KVShard], groups: Sequence[int], mesh: Mesh) -> int:
    """Return the blocks of each group of ranks, as the configuration says. Raises ConfigError."""
    block_bytes = sum(shard.pool_bytes(1) for shard, dp in zip(shards, groups, strict=True) if dp == 0)
    num_blocks = (engine.num_blocks or engine.kv_bytes // block_bytes) // mesh.dp
    if num_blocks < shards[0].layout.state_blocks + 2:
        said = f"num_blocks of {engine.num_blocks}" if engine.num_blocks else f"kv_bytes of {engine.kv_bytes}"
        raise ConfigError(
            f"engine.{said} holds {num_blocks} blocks of {block_bytes} bytes"
            + (f" for each of {mesh.dp} groups of ranks" if mesh.dp > 1 else "")
            + _for_states(shards[0].layout)
        )
    return num_blocks


def _for_states(layout: KVLayout) -> str:
    if not layout.state_blocks:
        return ""
    return f"; each sequence's recurrent state takes {layout.state_blocks}, beside those of its tokens"


def _blocks_with_room(
    engine: EngineConfig,
    shards: Sequence[KVShard],
    needs: Sequence[RankNeeds],
    found: RankMemory,
    *,
    sharing: Sequence[Sharing],
    max_context_tokens: int,
    draft_block_bytes: Sequence[int],
) -> int:
    """Return the blocks of each group of ranks for which the fullest rank has room. It is at least two, with which `check_fit`
    then says what is missing, and at most what all sequences need at their longest. Mostly they are shorter, and prefixes have
    the rest."""
    state_blocks = shards[0].layout.state_blocks
    most = engine.max_num_seqs * (state_blocks + num_blocks_for(max_context_tokens, engine.block_size))
    for shard, need, memory, shared, own in zip(
        shards, needs, found.devices, sharing, draft_block_bytes, strict=True
    ):
        if not shard.num_layers:
            break  # an encoder's blocks take no memory
        room = kv_room(memory, need, engine.memory_utilization, shared)
        if found.most_pool_bytes is not None:
            # A draft model's KV lies beside the memory that bounds the pool.
            most = min(most, found.most_pool_bytes // shard.pool_bytes(1))
        most = min(most, room // (shard.pool_bytes(1) + own))
    return max(most, state_blocks + 2)


def _stored_as(kv_dtype: str, layout: KVLayout) -> KVLayout:
    """Return how ranks keep the model. Raises ConfigError."""
    if kv_dtype == "auto":
        return layout
    if layout.state == "mla":
        raise ConfigError(
            f"engine.kv_dtype is {kv_dtype}, but this model keeps latents, which no kernel reads in 8 bits: use auto"
        )
    return replace(layout, dtype="float8_e4m3fn" if kv_dtype == "float8" else kv_dtype, scales="vector")
