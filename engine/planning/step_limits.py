"""How much one step may compute: what the configuration allows, and less for a while where a device had no memory for that."""

from core.config.cluster_config import EngineConfig
from core.plan import StepPlan

_LEAST_TOKENS = 16
"""The tokens of prompts that a step may always have: with so few of one sequence it is as small as it gets."""
_CUT_SLOTS = 8
"""One in so many of a step's sequences gives way."""
_RECOVERY_STEPS = 512
"""The steps in which a limit grows from nothing to what is configured: of those that find it too large there are few."""


class StepLimits:
    """Owned by one StepScheduler."""

    def __init__(self, config: EngineConfig, *, whole_prompts: bool) -> None:
        """`whole_prompts` are never cut: a step is made smaller by computing fewer of them."""
        self._most_tokens, self._most_seqs = config.max_batch_tokens, config.max_num_seqs
        self._tokens, self._seqs = float(self._most_tokens), float(self._most_seqs)
        self._whole_prompts = whole_prompts
        self._was_least = False
        """Whether the last step was as small as it gets, and has found no memory."""

    @property
    def prompt_tokens(self) -> int:
        """The most tokens of prompts in a step."""
        return int(self._tokens)

    @property
    def num_seqs(self) -> int:
        """The most sequences that run."""
        return int(self._seqs)

    def shrink(self, plan: StepPlan) -> bool:
        """Allow less than `plan` has, for which there was no memory: half of its prompts' tokens, but for a run that is computed
        whole, or fewer sequences. What is as small as it gets may be tried once more. Returns False where it has been."""
        num_tokens = plan.size.num_prompt
        least = max((count for work in plan.work for _, count in work.both_ways), default=0)
        if num_tokens > max(least, _LEAST_TOKENS) and not self._whole_prompts:
            self._tokens = float(num_tokens // 2)
        elif (num_seqs := len(plan.work)) > 1:
            self._seqs = float(num_seqs - max(1, num_seqs // _CUT_SLOTS))
        elif self._was_least:
            return False
        else:
            self._was_least = True
        return True

    def computed(self) -> None:
        """Allow a little more: there was memory for a step."""
        self._was_least = False
        self._tokens = min(self._most_tokens, self._tokens + self._most_tokens / _RECOVERY_STEPS)
        self._seqs = min(self._most_seqs, self._seqs + self._most_seqs / _RECOVERY_STEPS)
