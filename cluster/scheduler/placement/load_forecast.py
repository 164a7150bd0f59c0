"""Predicts what would happen on an instance, in seconds, from the step times that it has learned.

What an instance has not learned is taken from the fleet (`learned_paces`). Where nobody knows how long prompts take, its prompt
rate counts; where nobody knows how long decoding takes, that is taken to be in time."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.placement.learned_paces import LearnedPaces
from cluster.scheduler.placement.placement_policy import PlacementQuery
from cluster.scheduler.queue.hopeless import IdleEstimate
from core.cost.steps import LEARNED_STEPS, StepModel, StepModels, chunk_pairs
from core.pacing.pacing import prompt_tokens
from core.scheduler_tuning import SchedulerTuning


class LoadForecast:
    """One instance as it stands: what all predictions of prompts on it have in common, worked out once."""

    __slots__ = (
        "_beside",
        "_longest_s",
        "_model",
        "_rate",
        "_token_s",
        "all_s",
        "batch_tokens",
        "is_learned",
        "lag_s",
        "queue_s",
        "slot_s",
        "tuning",
        "version",
    )

    def __init__(self, member: Member, paces: LearnedPaces, tuning: SchedulerTuning) -> None:
        self.version, self.tuning = member.version, tuning
        self._rate = paces.tokens_per_s(member)
        num_seqs, context = member.batch_seqs, member.batch_context_tokens
        model = self._model = paces.prompt_steps(member)
        self.is_learned = model.num_steps >= LEARNED_STEPS
        steps = StepModels(paces.decode_steps(member), model)
        room = max(1, member.max_batch_tokens - num_seqs)
        tpot_s = member.tightest_tpot_s
        self.batch_tokens = (
            prompt_tokens(steps, num_seqs, context, tpot_s, budget_tokens=room, tuning=tuning)
            if num_seqs
            else room
        )
        """Prompt tokens of one step, as many as the decoding sequences' targets allow (`core.pacing.pacing`)."""
        beside = steps.beside(num_seqs, context, 0.0)
        self._beside = replace(beside, compute_s=model.token_s, bend_s=0.0)
        """The step-time model there, without the attention of prompts, which `prompt_s` adds."""
        self._token_s = self._beside.step_s(self.batch_tokens) / self.batch_tokens
        self.lag_s = tuning.lag_steps * member.step_s if member.is_busy else 0.0
        """Seconds from a message on its way until a step acts on it: the step that runs and the one that is planned. An idle
        instance acts at once, however long its steps are."""
        self.queue_s = self.prompt_s(member.tokens_before(late=False))
        """Seconds until all prompts that are there and not late are computed."""
        self.all_s = self.prompt_s(member.queued_tokens)
        """Seconds until all are."""
        self.slot_s = member.steps_to_slot * (decode_step_s(steps.decode, member) or member.step_s)
        """Seconds until one more sequence finds a slot; infinite while that cannot be foreseen."""
        num_tokens = min(member.queued_tokens, member.max_batch_tokens)
        self._longest_s = 0.0
        if num_tokens:
            pairs = chunk_pairs(0, num_tokens)
            self._longest_s = steps.mixed_step_s(num_tokens, num_tokens, 1, pairs)
        """The longest step that may have begun already. Nothing limits prompts before something decodes."""

    def joins_s(self, ready_s: float) -> float:
        """Return how long a sequence whose KV will be here in `ready_s` seconds may wait for a step of its own."""
        return max(self.lag_s, self._longest_s - ready_s)

    def prompt_s(self, num_tokens: float, start_tokens: float = 0.0) -> float:
        """Return the time to compute so many tokens of a prompt after `start_tokens` cached ones, from its turn on."""
        if num_tokens <= 0:
            return 0.0
        model = self._model
        if not model.num_steps:
            return num_tokens / self._rate
        pairs = num_tokens * (start_tokens + num_tokens / 2)
        context = max(1.0, num_tokens / self.batch_tokens) * (start_tokens + num_tokens / 2)
        one_step = num_tokens < self.batch_tokens
        steps_s = self._beside.step_s(num_tokens) if one_step else self._token_s * num_tokens
        return steps_s + model.pair_s * pairs + model.context_s * context


def late_if_idle(ask: PlacementQuery, members: Sequence[Member], num_errors: float) -> IdleEstimate | None:
    """Return when the quickest instance would give the first token if it had nothing else to do, where even that, less
    so many times its error, is too late. It is None as soon as one would be in time, or its steps are not known."""
    best: IdleEstimate | None = None
    for member in members:
        model, num_missing = member.steps.prompt, ask.uncached(member)
        if model.num_steps < LEARNED_STEPS:
            return None
        num_cached = ask.num_tokens - num_missing
        num_steps = ceil(num_missing / member.max_batch_tokens)
        steps_s = num_steps * (model.step_s(0, 0, 1) + model.context_s * (num_cached + num_missing / 2))
        found = IdleEstimate(steps_s + model.work_s(num_cached, num_missing), num_errors * model.error)
        if found.least_s <= ask.slo.ttft_s:
            return None
        if best is None or found.least_s < best.least_s:
            best = found
    return best


def decode_step_s(
    model: StepModel, member: Member, more_seqs: int = 0, more_context_tokens: float = 0.0
) -> float:
    """Return the time of one step of all that decodes or will decode there, and of `more_seqs` more, by that instance's step-time
    model; 0 while too little is known."""
    if model.num_steps < LEARNED_STEPS:
        return 0.0
    num_seqs = member.batch_seqs + more_seqs
    return model.step_s(num_seqs, member.batch_context_tokens + more_context_tokens, num_seqs)


def alone_step_s(model: StepModel, context_tokens: float) -> float:
    """Return the time of one step of one such sequence alone. No instance with that model is faster."""
    return model.step_s(1, context_tokens, 1) if model.num_steps >= LEARNED_STEPS else 0.0
