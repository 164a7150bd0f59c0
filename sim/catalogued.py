"""Configurations of both simulations for a catalogued GPU and model.

What the full one does layer by layer it does here in four groups of layers, each with the KV of a quarter of them: as many bytes,
fewer writes. Blocks are larger than in production, since nothing in either depends on their size but how prompts round up."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from core.config.cluster_config import load
from core.config.device_steps import GPU_BATCH_TOKENS, GPU_NUM_SEQS
from core.cost.step_profile import Profile
from core.errors import ConfigError
from core.types import Slo
from sim.bound import EngineBound
from sim.catalogue.catalogue import GPUS, MODELS, CatalogueModel, Gpu, link_cost, num_blocks, step_cost
from sim.catalogue.cost import LinkCost, ModelledStep
from sim.catalogue.device_profile import cost_of
from sim.coarse.world import CoarseConfig, DeviceGroup
from sim.shared_cards import CardShares, shared_cost
from sim.simulated_run import SimConfig

_LAYER_GROUPS = 4
_MEMORY_LINK = LinkCost(bytes_per_s=2.5e9)
ASKED_TOKENS = 32_768
"""`CoarseConfig.asked_tokens` of traces: they tell how long outputs became, not how long they might have."""
"""A link between two instances of one host: a copy in memory."""
FULL_BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Instances of one kind."""

    gpu: str
    model: str
    num_prefill: int
    num_decode: int
    num_both: int = 0
    tp: int = 1
    pp: int = 1
    """An instance is `pp` stages of `tp` GPUs each."""
    profile: Profile | None = None
    """Measured instances, in place of the catalogue's GPU and model."""
    changed: Gpu | None = None
    """A GPU that the catalogue does not have, in place of `gpu`."""
    read: CatalogueModel | None = None
    """A model that the catalogue does not have, called `model`."""
    host_bytes: float = 0.0
    """Host memory of an instance for KV, as `engine.host_cache_bytes`."""
    shares: CardShares | None = None
    """How each card is shared by a prefill and a decode instance, of which there are equally many; None: none is."""

    def __post_init__(self) -> None:
        """Raise ConfigError for names that the catalogue does not have."""
        if self.gpu not in GPUS or (self.read is None and self.model not in MODELS):
            raise ConfigError(
                f"unknown GPU or model: {self.gpu}, {self.model}; known: {', '.join(GPUS)}; {', '.join(MODELS)}"
            )

    @property
    def parts(self) -> tuple[Gpu, CatalogueModel]:
        return self.changed or GPUS[self.gpu], self.read or MODELS[self.model]

    @property
    def step_model(self) -> ModelledStep:
        return cost_of(self.profile) if self.profile else step_cost(*self.parts, self.tp, self.pp)

    @property
    def gpus_per_instance(self) -> int:
        return self.tp * self.pp

    @property
    def num_instances(self) -> int:
        return self.num_prefill + self.num_decode + self.num_both

    @property
    def num_units(self) -> int:
        """The number of what the fleet grows by: instances, or cards that two of them share."""
        return self.num_decode if self.shares else self.num_instances

    def resized(self, count: int) -> "Fleet":
        """Return it with so many units, of its one role."""
        if self.shares is not None:
            return replace(self, num_prefill=count, num_decode=count)
        role = "num_prefill" if self.num_prefill else "num_decode" if self.num_decode else "num_both"
        return replace(self, **{role: count})

    @property
    def dollars_per_h(self) -> float:
        return self.num_units * self.gpus_per_instance * self.parts[0].dollars_per_h


def engine_of(fleet: Fleet, block_tokens: int) -> EngineBound:
    """Return what bounds any scheduler on a catalogued instance of the fleet: no pipeline of its stages ever waits."""
    gpu, model = fleet.parts
    cost = step_cost(gpu, model, fleet.tp, fleet.pp).of_full_stages()
    blocks = num_blocks(gpu, model, block_tokens, fleet.gpus_per_instance)
    return EngineBound(
        cost, GPU_NUM_SEQS, blocks * block_tokens, model.state_blocks(block_tokens) * block_tokens
    )


def engines_of(fleet: Fleet, block_tokens: int) -> tuple[EngineBound, EngineBound]:
    """Return what bounds the computing of prompts, and of tokens. On a shared card the other instance is idle all the while."""
    if fleet.shares is None:
        engine = engine_of(fleet, block_tokens)
        return engine, engine
    gpu, model = fleet.parts
    prefill, decode = (
        EngineBound(
            shared_cost(gpu, model, own, other).alone(),
            GPU_NUM_SEQS,
            num_blocks(gpu, model, block_tokens, 1, own.memory) * block_tokens,
            model.state_blocks(block_tokens) * block_tokens,
        )
        for own, other in fleet.shares.both_ways
    )
    return prefill, decode


def full_config(fleet: Fleet, slo: Slo) -> SimConfig:
    """Raises ConfigError for shared cards, recurrent states and host memory, which the coarse simulation alone has."""
    if fleet.shares is not None:
        raise ConfigError("the full simulation has no cards that instances share: use the coarse one")
    if fleet.host_bytes:
        raise ConfigError("the full simulation has no host memory for KV: use the coarse one")
    if fleet.profile is not None:
        return _full_profiled(fleet, fleet.profile, slo)
    gpu, model = fleet.parts
    if model.state_bytes:
        raise ConfigError(
            f"the full simulation has no recurrent states, which {fleet.model} keeps: use the coarse one"
        )
    return SimConfig(
        num_prefill=fleet.num_prefill,
        num_decode=fleet.num_decode,
        num_blocks=num_blocks(gpu, model, FULL_BLOCK_TOKENS, fleet.gpus_per_instance),
        num_layers=_LAYER_GROUPS,
        num_kv_heads=1,
        head_dim=model.kv_token_bytes // (4 * _LAYER_GROUPS),
        step=fleet.step_model,
        link=link_cost(gpu, fleet.gpus_per_instance),
        slo=slo,
        overrides={
            "engine.block_size": FULL_BLOCK_TOKENS,
            "engine.max_batch_tokens": GPU_BATCH_TOKENS,
            "engine.max_num_seqs": GPU_NUM_SEQS,
        },
        num_both=fleet.num_both,
    )


def mixed_config(fleets: Sequence[Fleet], block_tokens: int) -> CoarseConfig:
    """Return one cluster of instances of several kinds, all of one model."""
    first, *others = (coarse_config(fleet, block_tokens) for fleet in fleets)
    return replace(first, others=(*first.others, *(group for other in others for group in other.groups)))


def coarse_config(fleet: Fleet, block_tokens: int) -> CoarseConfig:
    if fleet.profile is not None:
        return _coarse_profiled(fleet, fleet.profile, block_tokens)
    gpu, model = fleet.parts
    if fleet.shares is not None:
        whole = coarse_config(replace(fleet, shares=None), block_tokens)
        return _on_shared_cards(whole, fleet, fleet.shares)
    return CoarseConfig(
        num_prefill=fleet.num_prefill,
        num_decode=fleet.num_decode,
        num_both=fleet.num_both,
        block_tokens=block_tokens,
        num_blocks=num_blocks(gpu, model, block_tokens, fleet.gpus_per_instance),
        kv_token_bytes=model.kv_token_bytes,
        state_blocks=model.state_blocks(block_tokens),
        host_blocks=int(fleet.host_bytes // (model.kv_token_bytes * block_tokens)),
        host_bytes_per_s=gpu.host_bytes_per_s * fleet.gpus_per_instance,
        num_layers=model.num_layers,
        max_batch_tokens=GPU_BATCH_TOKENS,
        max_num_seqs=GPU_NUM_SEQS,
        step=fleet.step_model,
        link=link_cost(gpu, fleet.gpus_per_instance),
        asked_tokens=ASKED_TOKENS,
        schedule=load(None, {}, {}).schedule,
    )


def _on_shared_cards(whole: CoarseConfig, fleet: Fleet, shares: CardShares) -> CoarseConfig:
    """Return the instances of `whole` as two groups whose instances share cards, the prefill instances first."""
    (gpu, model), cards = fleet.parts, f"{fleet.gpu} {shares}"
    prefill, decode = (
        DeviceGroup(
            num_prefill=whole.num_prefill if own is shares.prefill else 0,
            num_decode=whole.num_decode if own is shares.decode else 0,
            num_both=0,
            num_blocks=num_blocks(gpu, model, whole.block_tokens, 1, own.memory),
            step=shared_cost(gpu, model, own, other),
            link=whole.link,
            cards=cards,
        )
        for own, other in shares.both_ways
    )
    return replace(
        whole,
        num_decode=0,
        num_blocks=prefill.num_blocks,
        step=prefill.step,
        cards=cards,
        others=(decode,),
    )


def _full_profiled(fleet: Fleet, profile: Profile, slo: Slo) -> SimConfig:
    """Return an instance as it was measured: the server's own defaults, all KV heads of a layer as one."""
    return SimConfig(
        num_prefill=fleet.num_prefill,
        num_decode=fleet.num_decode,
        num_blocks=profile.num_blocks,
        num_layers=profile.num_layers,
        num_kv_heads=1,
        head_dim=profile.kv_token_bytes // (4 * profile.num_layers),
        step=cost_of(profile),
        link=_MEMORY_LINK,
        slo=slo,
        num_both=fleet.num_both,
    )


def _coarse_profiled(fleet: Fleet, profile: Profile, block_tokens: int) -> CoarseConfig:
    config = load(None, {}, {})
    return CoarseConfig(
        num_prefill=fleet.num_prefill,
        num_decode=fleet.num_decode,
        num_both=fleet.num_both,
        block_tokens=block_tokens,
        num_blocks=profile.num_blocks * config.engine.block_size // block_tokens,
        kv_token_bytes=profile.kv_token_bytes,
        host_blocks=int(fleet.host_bytes // (profile.kv_token_bytes * block_tokens)),
        num_layers=profile.num_layers,
        max_batch_tokens=config.engine.max_batch_tokens,
        max_num_seqs=config.engine.max_num_seqs,
        step=cost_of(profile),
        link=_MEMORY_LINK,
        asked_tokens=ASKED_TOKENS,
        schedule=config.schedule,
    )
