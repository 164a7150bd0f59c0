"""What a device of the coarse simulation is."""

from dataclasses import dataclass

from core.cost.steps import StepModels
from sim.catalogue.cost import ModelledStep
from sim.coarse.outlink import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    step: ModelledStep
    link: Link
    num_layers: int
    message_s: float
    steps: StepModels
    """What it has learned of its step times; in production it learns on."""
    lookahead: bool = True
    host_bytes_per_s: float = 0.0
    """How fast KV comes back from host memory, which keeps that of preempted sequences; 0: they are computed again."""
    longest_pause_s: float = 5.0
    """As engine.longest_pause_s."""
    shares_card: bool = False
    """Whether how long its steps take changes with what another device does."""
    mixed_batch_tokens: int = 0
    """A bound on the tokens of a step that decodes too, in place of the worker policy's; 0: the policy's."""
    grant_ttl_s: float = 120.0
    """As transfer.grant_ttl_s."""
