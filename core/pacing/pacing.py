"""How much of a prompt a step may compute beside sequences that decode, so that all of them are in time.

This lets any instance prefill, decode or do both. Without sequences that decode the whole step is for prompts. Beside them a step
computes what it can while it reads weights and KV, which costs nearly nothing. It gets longer where prompts need it for their
first tokens, up to the instant at which the first of the decoding sequences must have its next token. What a sequence got early
it may spend later; one that is behind gets the shortest steps in which prompts still go on.

Prompts that no deadline hurries may still keep others waiting, in the scheduler, which sends no more than these before they are
computed. So where there are more than it sends ahead, steps get longer as well, as far as that computes more in the same time and
all keep their pace. What prompts gain is known no better than steps' times, so a step may always take a small share of the pace:
work without haste is computed in full steps."""

from collections.abc import Sequence as Seq
from math import inf

from core.cost.steps import PromptStepModel, StepModels
from core.pacing.lateness import due_at
from core.ports import ServedSequence
from core.scheduler_tuning import SchedulerTuning


def tokens_in_time(
    decoding: Seq[ServedSequence],
    context_tokens: int,
    prompts: Seq[ServedSequence],
    steps: StepModels,
    budget_tokens: int,
    starts_at: float,
    *,
    tuning: SchedulerTuning,
) -> int:
    """Return the prompt tokens, at most `budget_tokens`, with which a step that begins at `starts_at` leaves all in time.

    `prompts` are all that are here, those that have been begun first, in the order in which they get them. What the first has
    behind it is what their attention reads."""
    if not decoding or not steps.prompt.num_steps:
        return budget_tokens
    model = steps.beside(len(decoding), context_tokens, prompts[0].num_computed if prompts else 0)
    pace_s = _sure(steps, tuning) * min(seq.request.slo.tpot_s for seq in decoding)
    works_s = [steps.prompt.work_s(seq.num_computed, len(seq.tokens) - seq.num_computed) for seq in prompts]
    needed_s = max(
        _needed_s(prompts, works_s, model, starts_at),
        min(_backlog_s(sum(works_s), model, steps, tuning), pace_s),
        tuning.easy_share * pace_s,
    )
    return _tokens(
        model,
        steps,
        budget_tokens,
        tuning,
        needed_s=needed_s,
        slack_s=min(slack_s(seq, starts_at) for seq in decoding),
    )


def slack_s(seq: ServedSequence, now: float) -> float:
    """Return how long a step that begins now may take for the sequence's next token to be in time."""
    tpot_s = seq.request.slo.tpot_s
    if inf in (seq.first_token_at, tpot_s):
        return tpot_s
    return seq.first_token_at + seq.num_after_first * tpot_s - now


def _needed_s(
    prompts: Seq[ServedSequence], works_s: Seq[float], model: PromptStepModel, starts_at: float
) -> float:
    """Return how long a step must be so that all prompts that can be in time are. `works_s` is what each takes. Up to one of
    them, prompts need a share of the time that is left; each step spends what decoding computes beside them, and none is longer
    than they need."""
    least_s, work_s, share, most_s = model.step_s(0), 0.0, 0.0, 0.0
    dues = [due_at(seq.request) for seq in prompts]
    for due, own_s in sorted(zip(dues, works_s, strict=True), key=_due):
        if due == inf:
            break  # nothing hurries these
        left_s = due - starts_at - least_s
        if own_s > left_s:
            continue  # it is late already
        work_s += own_s
        if work_s > share * left_s:
            share, most_s = work_s / left_s, work_s
    prompts_s = model.computes_s * share / (1 - share) if share < 1 else inf
    return model.computes_s + min(prompts_s, most_s)


def _backlog_s(work_s: float, model: PromptStepModel, steps: StepModels, tuning: SchedulerTuning) -> float:
    """Return how long a step is with which prompts that keep others waiting get nearly the full rate; 0 where none do."""
    if work_s <= tuning.room_s:
        return 0.0
    return model.step_s(0) + tuning.backlog_gain * steps.prompt.fixed_s


def _due(pair: tuple[float, float]) -> float:
    return pair[0]


def prompt_tokens(
    steps: StepModels,
    num_decoding: int,
    context_tokens: float,
    tpot_s: float,
    *,
    budget_tokens: int,
    tuning: SchedulerTuning,
) -> int:
    """Return the prompt tokens of one step beside sequences that keep their pace and no more, where no prompt is in a hurry."""
    if not steps.prompt.num_steps:
        return budget_tokens
    model = steps.beside(num_decoding, context_tokens, 0.0)
    needed_s = tuning.easy_share * _sure(steps, tuning) * tpot_s
    return _tokens(model, steps, budget_tokens, tuning, needed_s=needed_s, slack_s=tpot_s)


def _tokens(
    model: PromptStepModel,
    steps: StepModels,
    budget_tokens: int,
    tuning: SchedulerTuning,
    *,
    needed_s: float,
    slack_s: float,
) -> int:
    reads_s, fixed_s = model.step_s(0), steps.prompt.fixed_s
    wanted_s = max(needed_s, model.step_s(model.free_tokens), reads_s + tuning.gainful * fixed_s)
    least_s = model.computes_s + tuning.catch_up_gain * fixed_s
    limit_s = max(min(wanted_s, _sure(steps, tuning) * slack_s), least_s)
    tokens = max(model.free_tokens, model.tokens_within(limit_s))
    return max(min(tuning.min_tokens, budget_tokens), int(min(budget_tokens, tokens)))


def _sure(steps: StepModels, tuning: SchedulerTuning) -> float:
    """Return the share of a time that steps may be predicted to take. It is never 0: a model that is far off mostly predicts too
    much."""
    return 1 / (1 + tuning.sure_errors * steps.prompt.error)
