"""Configurations of both simulations for a catalogued GPU and model.

What the full one does layer by layer it does here in four groups of layers, each with the KV of a quarter of them: as many bytes,
fewer writes. Blocks are larger than in production, since nothing in either depends on their size but how prompts round up."""

from dataclasses import dataclass

from core.config import load
from core.errors import ConfigError
from core.types import Slo
from sim.catalogue import GPUS, MODELS, Gpu, Model, link_cost, num_blocks, step_cost
from sim.coarse.world import CoarseConfig
from sim.cost import StepModel
from sim.run import SimConfig

_LAYER_GROUPS = 4
FULL_BLOCK_TOKENS = 64
MAX_BATCH_TOKENS, MAX_NUM_SEQS = 8192, 256


@dataclass(frozen=True, slots=True)
class Fleet:
    """Instances of one kind, each a GPU."""

    gpu: str
    model: str
    num_prefill: int
    num_decode: int
    num_both: int = 0
    step: StepModel | None = None
    """In place of the catalogue's roofline."""

    def __post_init__(self) -> None:
        """Raises ConfigError for names that the catalogue does not have."""
        if self.gpu not in GPUS or self.model not in MODELS:
            raise ConfigError(
                f"unknown GPU or model: {self.gpu}, {self.model}; known: {', '.join(GPUS)}; {', '.join(MODELS)}"
            )

    @property
    def parts(self) -> tuple[Gpu, Model]:
        return GPUS[self.gpu], MODELS[self.model]

    @property
    def step_model(self) -> StepModel:
        return self.step or step_cost(*self.parts)


def full_config(fleet: Fleet, slo: Slo) -> SimConfig:
    gpu, model = fleet.parts
    return SimConfig(
        fleet.num_prefill,
        fleet.num_decode,
        num_blocks(gpu, model, FULL_BLOCK_TOKENS),
        _LAYER_GROUPS,
        model.num_kv_heads * model.num_layers // _LAYER_GROUPS,
        model.head_dim,
        fleet.step_model,
        link_cost(gpu),
        slo=slo,
        overrides={
            "engine.block_size": FULL_BLOCK_TOKENS,
            "engine.max_batch_tokens": MAX_BATCH_TOKENS,
            "engine.max_num_seqs": MAX_NUM_SEQS,
        },
    )


def coarse_config(fleet: Fleet, block_tokens: int) -> CoarseConfig:
    gpu, model = fleet.parts
    return CoarseConfig(
        fleet.num_prefill,
        fleet.num_decode,
        fleet.num_both,
        block_tokens,
        num_blocks(gpu, model, block_tokens),
        model.kv_token_bytes,
        model.num_layers,
        MAX_BATCH_TOKENS,
        MAX_NUM_SEQS,
        fleet.step_model,
        link_cost(gpu),
        schedule=load(None, {}, {}).schedule,
    )
