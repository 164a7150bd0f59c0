"""What the fleet has learned of its steps, for instances that have not learned it themselves.

A decode instance may have computed no prompt yet, a prefill instance decodes nothing, and a new instance knows nothing at all."""

from typing import Final

from cluster.scheduler.fleet.member import DEFAULT_TOKENS_PER_S, Member
from core.cost.steps import LEARNED_STEPS, UNKNOWN_STEPS, StepModel

_RECENT_SHARE: Final = 0.05


class LearnedPaces:
    def __init__(self) -> None:
        self._tokens_per_s = 0.0
        self._decode, self._prompt = UNKNOWN_STEPS.decode, UNKNOWN_STEPS.prompt

    def measured(self, member: Member) -> None:
        rate = member.measured_tokens_per_s
        if rate > 0:
            known = self._tokens_per_s
            self._tokens_per_s = known + _RECENT_SHARE * (rate - known) if known else rate
        if member.steps.decode.num_steps >= LEARNED_STEPS:
            self._decode = member.steps.decode
        if member.steps.prompt.num_steps >= LEARNED_STEPS:
            self._prompt = member.steps.prompt

    def tokens_per_s(self, member: Member) -> float:
        """Return the member's own prompt rate, else the fleet's mean, else an assumption."""
        return member.measured_tokens_per_s or self._tokens_per_s or DEFAULT_TOKENS_PER_S

    def prompt_steps(self, member: Member) -> StepModel:
        """Return the member's own model of steps with prompts. Where it has not learned one it is that of the instance which has
        reported last; unknown where there is none."""
        own = member.steps.prompt
        return own if own.num_steps >= LEARNED_STEPS else self._prompt

    def decode_steps(self, member: Member) -> StepModel:
        """Return the same of steps that only decode."""
        own = member.steps.decode
        return own if own.num_steps >= LEARNED_STEPS else self._decode
