"""What the full simulation is asked to run, and what comes of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from core.cost.steps import UNKNOWN_STEPS, StepModels
from core.types import Slo
from sim.catalogue.cost import LinkCost, ModelledStep, StepCost
from sim.fleet_changes import Failure, InstanceLife
from sim.tenants import Tenants

VOCAB_SIZE = 32_000
SETTLE_S = 0.5
"""The time for all instances to register before the first arrival."""
HOST = "simulated"
STAGGER_S = 0.03
"""The time between two instances' starts, so that they register in the same order under any clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    num_prefill: int = 1
    num_decode: int = 1
    num_blocks: int = 4096
    num_layers: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    step: ModelledStep = field(default_factory=StepCost)
    steps: StepModels = UNKNOWN_STEPS
    """What instances know of their step times when they start, as from a profile."""
    link: LinkCost = field(default_factory=LinkCost)
    pairs: Mapping[tuple[str, str], LinkCost] = field(default_factory=dict[tuple[str, str], LinkCost])
    """Links of single pairs of instances, as (sender, receiver) by their mail addresses."""
    message_latency_s: float = 0.0002
    slo: Slo = field(default_factory=Slo)
    """The class of every request."""
    overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Overrides of ClusterConfig by dotted keys."""
    num_both: int = 0
    """Instances that do either role."""
    num_ingresses: int = 1
    """Requests are spread over them in turn. The number of schedulers is `serve.schedulers` of the overrides."""
    tenants: Tenants | None = None
    """None: all requests are of `slo`, whoever asks."""
    failures: Sequence[Failure] = ()
    cold_start_s: float | None = None
    """Where it is set, the production autoscaler sizes pools by the configuration's `scaling`, and an instance that it starts
    serves so many seconds later. None: sizes stay."""


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    """Seconds after the start; where it follows another, after that one's answer or refusal."""
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    tenant: str = field(default="", kw_only=True)
    follows: int | None = field(default=None, kw_only=True)
    """The number of the arrival that it follows: the next turn of a session."""
    num_shared: int = field(default=0, kw_only=True)
    """Its prompt begins with so many tokens of that one's prompt as it was sent, in place of its own."""
    has_answer: bool = field(default=False, kw_only=True)
    """Whether that one's answer comes next in its prompt."""

    def after(self, prompt: tuple[int, ...], answer: tuple[int, ...], ended_at: float) -> "Arrival":
        """Return it as it comes, once the one that it follows has ended."""
        begins = prompt[: self.num_shared] + (answer if self.has_answer else ())
        return replace(self, at=ended_at + self.at, prompt=begins + self.prompt[len(begins) :])


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLoad:
    """Requests that an ingress' batch runner sends, `at_once` at a time, beside the arrivals."""

    lines: Sequence[Arrival]
    """When they would come by themselves is ignored."""
    at_once: int
    slo: Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What happened. `tokens[i]` and `first_token_at[i]` belong to the i-th arrival; times count from `arrived_at[i]`.

    A request that was refused or could not be finished has infinite times."""

    tokens: tuple[tuple[int, ...], ...]
    first_token_at: tuple[float, ...]
    last_token_at: tuple[float, ...]
    decisions: tuple[str, ...]
    token_times: tuple[tuple[float, ...], ...]
    """The time of every token; where a request was not finished, of those that came."""
    arrived_at: tuple[float, ...]
    lives: tuple[InstanceLife, ...]
    """All instances that there were."""
    batch_s: tuple[float, ...] = ()
    """When each line of the batch was answered, from the first arrival on."""
