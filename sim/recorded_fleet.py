"""A fleet as its scheduler recorded it, for the coarse simulation: instances with the step times that they had learned."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from core.config.cluster_config import ScheduleConfig
from core.cost.steps import LEARNED_STEPS, StepModels
from core.errors import ConfigError
from core.reports import Register
from core.scheduler_tuning import SchedulerTuning
from sim.catalogue.cost import LinkCost
from sim.coarse.world import CoarseConfig, DeviceGroup


@dataclass(frozen=True, slots=True)
class LearnedCost:
    """sim.catalogue.cost.ModelledStep of step-time models that an instance has learned."""

    steps: StepModels

    @property
    def unread_decay(self) -> float:
        return self.steps.decode.unread_decay

    def step_s(self, num_tokens: int, context_tokens: int, num_pairs: float, num_seqs: int) -> float:
        if num_tokens == num_seqs:
            return self.steps.decode.step_s(num_tokens, context_tokens, num_seqs)
        prompt_pairs = max(0.0, num_pairs - context_tokens)
        return self.steps.mixed_step_s(num_tokens, context_tokens, num_seqs, prompt_pairs)


def recorded_fleet(
    instances: Mapping[str, Register],
    steps: Mapping[str, StepModels],
    schedule: ScheduleConfig,
    block_tokens: int,
    *,
    asked_tokens: Sequence[int],
    tuning: SchedulerTuning,
) -> CoarseConfig:
    """Return a fleet of such instances, decided by `tuning`. `asked_tokens`: the longest output that each request allowed. Raises
    ConfigError where no instance has learned its steps."""
    first, *others = _groups(instances, steps, schedule, block_tokens)
    decodes = next((info for info in instances.values() if info.decodes), None)
    if decodes is None:
        raise ConfigError("no instance of the recording decodes")
    return CoarseConfig(
        num_prefill=first.num_prefill,
        num_decode=first.num_decode,
        num_both=first.num_both,
        block_tokens=block_tokens,
        num_blocks=first.num_blocks,
        kv_token_bytes=decodes.kv_token_bytes,
        state_blocks=decodes.state_blocks,
        max_batch_tokens=decodes.max_batch_tokens,
        max_num_seqs=decodes.max_num_seqs,
        step=first.step,
        link=first.link,
        asked_tokens=median_low(asked_tokens),
        schedule=schedule,
        tuning=tuning,
        others=tuple(others),
    )


def _groups(
    instances: Mapping[str, Register],
    steps: Mapping[str, StepModels],
    schedule: ScheduleConfig,
    block_tokens: int,
) -> list[DeviceGroup]:
    """Return the instances that are alike, together. One that has not learned its steps takes those of another."""
    known = {name: one for name, one in steps.items() if _is_known(one)}
    if not instances or not known:
        raise ConfigError(
            "no instance of the recording had learned how long its steps take: record for longer"
        )
    any_steps = known[min(known)]
    kinds = Counter(
        (
            info.prefills,
            info.decodes,
            info.num_blocks * info.block_size // block_tokens,
            known.get(name, any_steps),
        )
        for name, info in instances.items()
    )
    return [
        DeviceGroup(
            num_prefill=count if prefills and not decodes else 0,
            num_decode=count if decodes and not prefills else 0,
            num_both=count if prefills and decodes else 0,
            num_blocks=num_blocks,
            step=LearnedCost(learned),
            link=LinkCost(bytes_per_s=schedule.link_bytes_per_s),
        )
        for (prefills, decodes, num_blocks, learned), count in kinds.items()
    ]


def _is_known(steps: StepModels) -> bool:
    return min(steps.decode.num_steps, steps.prompt.num_steps) >= LEARNED_STEPS
