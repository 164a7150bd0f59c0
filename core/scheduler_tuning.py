"""Every constant of the law of placement: what the scheduler and the instances' step planning decide by.

A docstring begins with the unit and the range of sense. A value beyond it may switch a rule off: `benchmarks.goodput.rules` says
which one, and `python -m benchmarks.goodput ablate` measures what each rule and constant brings. Left out are sizes of shortlists
and memories, what is assumed of hardware until it is measured, and how soon refused clients may come back."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import isnan
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerTuning:
    handover_s: float = 0.003
    """s, 0 to 0.1: the messages of a hand-over take so long."""
    link_share: float = 0.1
    """GPU s per s, 0 to 1: the cost of a second in which a link moves KV, since the link is taken from others."""
    ttft_margin: float = 0.9
    """share, 0.5 to 1: predictions are trusted up to this share of the time to the first token."""
    tpot_margin: float = 0.99
    """share, 0.5 to 1: batches are filled up to this share of the time per token, and steps then take about as much."""
    reach: float = 1.5
    """steps, 1 to 4: no target counts as tighter than so many steps of a sequence that is alone."""
    delay_weight: float = 0.1
    """GPU s per s, 0 to 1: the cost of a second until the first token."""
    late_weight: float = 1.0
    """GPU s per s, 0 to 10: the same for a request that will be late."""
    prefill_only_price: float = 0.1
    """GPU s per s, 0 to 1: the cost of a second of an instance that does not decode, since nothing else can use it."""
    risk_weight: float = 2.0
    """times, 0 to 10: the cost of a prediction at its margin, in times of the request's own GPU time."""
    lag_steps: float = 1.5
    """steps, 0 to 4: a message acts after the step that runs and the one that is planned."""
    short_share: float = 0.05
    """share, 0.01 to 0.5: a wait before the second token is spread over the output that this share of outputs do not exceed."""
    room_s: float = 0.1
    """s, 0.02 to 1: an instance gets prompts for so long ahead. It takes more of them for a backlog that others wait behind."""
    unlearned_room_s: float = 1.0
    """s, 0.1 to 5: the same where the time of steps is not known yet, so that predictions may be far off."""
    enough_outputs: int = 20
    """outputs, 1 to 200: so many must have ended before slots are foreseen to come free."""
    chance: float = 1.5
    """times, 0 to 4: a lone sequence gets room for so many times its expected output: four of five are no longer."""
    spare_tokens: int = 16
    """tokens, 0 to 64: so many are left for each sequence that runs before a newcomer gets blocks."""
    fetch_tokens: int = 128
    """tokens, 16 to 4096: a cached prefix of so many is worth being fetched from a decode instance."""
    settle_reports: float = 2.0
    """intervals, 1 to 10: a report shows what was reserved so many report intervals and `settle_s` before."""
    settle_s: float = 0.2
    """s, 0 to 2: the way from scheduler to frontend to worker."""
    expected_tokens: float = 256.0
    """tokens, 16 to 4096: the mean output that a cold fleet expects."""
    num_expected: float = 4.0
    """outputs, 0 to 100: what is expected beforehand counts as so many outputs, so that nothing jumps."""
    length_decay: float = 0.998
    """factor, 0.9 to 1: on what an output counts for each that comes later: about the last 500 do."""
    length_shape: float = 2.5
    """exponent, 1.5 to 5: of the log-logistic lengths expected. What has come far goes on for two thirds as long again."""
    late_share: float = 0.5
    """share, 0 to 0.9: a late request leaves this share of an instance to those that can be in time."""
    late_come_s: float = 30.0
    """s, 1 to 120: it leaves nothing once none has come for so long, which is about how long an answer takes."""
    overload_s: float = 5.0
    """s, 0 to 60: the fleet is short of time for so long after a request that could be in time has had to wait."""
    num_errors: float = 2.0
    """times, 0 to 5: an estimate counts less so many times its mean error before a prompt is called hopeless."""
    early_s: float = 0.4
    """s, 0 to 5: a prompt that must be begun this soon is computed before a slot is free for its sequence."""
    due_s: float = 10.0
    """s, 0 to 60: longer targets are ordered as this one, so that they do not wait for ever."""
    patience_s: float = 1.0
    """s, 0 to 30: a request that finds no room for so long has an instance kept for it."""
    sure_share: float = 0.9
    """share, 0.5 to 1: requests are sure to take this share of their apparent work, since what is deferred may be lost."""
    start_share: float = 0.3
    """share, 0 to 0.9: of the time to the first token, which may pass on the instance before the prompt's turn comes."""
    yield_s: float = 10.0
    """s, 0 to 60: a late prompt lets others pass for so long after its target, and then takes its turn again."""
    max_passed: int = 32
    """requests, 1 to 1000: so many of one level at the head that find no place hold the others behind them up."""
    num_learned: float = 20.0
    """requests, 1 to 200: placed ones after which it is known what requests take beside their prompts."""
    remembered_s: float = 20.0
    """s, 2 to 200: of the fleet's time, in which that is learned."""
    credit: float = 4.0
    """requests, 0.5 to 50: a tenant may be behind another by so many where that puts more in time."""
    output_weight: float = 2.0
    """tokens, 0.5 to 5: of a prompt, as which a token of output is charged to its tenant."""
    drain_least_s: float = 3.0
    """s, 0.5 to 30: requests must have waited for so long before it is foreseen how soon the queue drains."""
    drain_window_s: float = 30.0
    """s, 5 to 120: the time over which that is measured."""
    drain_known_s: float = 60.0
    """s, 5 to 600: the time for which it is known after the queue was empty."""
    gainful: float = 3.0
    """times, 0 to 30: where all have time, prompts get so many times a step's overhead: three quarters of the full rate."""
    backlog_gain: float = 9.0
    """times, 0 to 30: the same while others wait behind them: nine tenths of the full rate."""
    catch_up_gain: float = 1.0
    """times, 0 to 5: the same beside a sequence that is behind, which may be so for good: half the full rate."""
    easy_share: float = 0.1
    """share, 0 to 0.5: of the tightest time per token, which prompts get whatever they gain by it."""
    min_tokens: int = 64
    """tokens, 1 to 512: prompts go on with so many even where decoding alone takes too long."""
    sure_errors: float = 2.0
    """times, 0 to 5: predictions of steps are trusted up to so many times their mean error."""
    class_share: float = 0.8
    """share, 0 to 1: lower classes may make a step as long as this share of a higher one's time per token."""
    class_catch_up: float = 0.25
    """share, 0 to 1: each step makes up for this share of what a higher class's sequence is behind."""
    stretch: float = 1.5
    """times, 1 to 4: lower classes may make steps so many times as long where the next tokens of higher ones are in time."""
    least_share: float = 0.25
    """share, 0.01 to 1: of its pace or time, which nothing is left without, whatever comes of higher classes."""
    unnamed_s: float = 10.0
    """s, 0 to 60: prompts without a target are ordered on an instance as if this were it."""
    pauses_s: float = 1.0
    """s, 0.6 to 10: a sequence that is ahead of its pace by so much may pause and give up its blocks."""
    returns_s: float = 0.5
    """s, 0.1 to 2: it comes back when its next token is due within so much: others make room, and its KV is read."""
    counts_s: float = 4.0
    """s, 1 to 20: requests are placed on blocks of sequences that are ahead by so much."""
    overcommit_share: float = 0.5
    """share, 0 to 0.9: of the pool or host memory, whichever is less, by which sequences may hold more than the pool."""
    scaling_wait_s: float = 2.0
    """s, 0.2 to 20: so much prompt work in an instance's queue counts as much as one instance when pools are sized."""
    scaling_tpot_share: float = 0.8
    """share, 0.3 to 1: an instance whose steps take this share of the tightest time per token is fully used."""
    cold_start_share: float = 0.3
    """share, 0.05 to 1: of what a measured cold start differs from the expected one, by which the latter moves."""
    hopeless_give_way: bool = True
    """A hopeless prompt that is taken has the next lower priority."""
    late_last: bool = True
    """The queue tries what can no longer begin in time after what still can."""
    late_yield: bool = True
    """On an instance, late prompts let others pass, and count for late ones only."""
    binds_late: bool = True
    """A prompt waits in the scheduler while an instance has prompts for `room_s`."""
    seen_above: bool = True
    """A class that finds no place in time looks again as though lower ones were gone."""
    fair_early: bool = True
    """No prompt is computed before a slot is free while one of another line waits for such a place."""
    short_roam: bool = True
    """A short prompt may be computed elsewhere where its decode instance has no slot."""
    alike: bool = True
    """The first sequence of a batch costs what each further one does, so sequences spread."""
    foresees_contexts: bool = True
    """Room is kept for what sequences will hold, and not only for what they hold now."""
    learns_running: bool = True
    """Output lengths are learned from outputs that still run, too."""
    learns_links: bool = True
    """A link is as fast as its sender has measured, not as where hosts stand suggests."""
    reserves_links: bool = True
    """Bytes that are placed count on their link until they have left."""


DEFAULT_TUNING: Final = SchedulerTuning()


def tuned(changes: Mapping[str, float], base: SchedulerTuning = DEFAULT_TUNING) -> SchedulerTuning:
    """Return `base` with other values of the constants named. A switch takes 0 or 1. Raises ValueError."""
    values: dict[str, Any] = {name: _value(name, value, base) for name, value in changes.items()}
    return replace(base, **values)


def _value(name: str, value: float, base: SchedulerTuning) -> float:
    known = getattr(base, name) if name in {field.name for field in fields(base)} else None
    if known is None:
        raise ValueError(f"{name!r} is no constant of placement: core/scheduler_tuning.py lists them")
    if isinstance(known, bool):
        if value not in (0, 1):
            raise ValueError(f"{name} is on (1) or off (0), not {value:g}")
        return bool(value)
    if isinstance(known, int):
        if value != int(value) or value < 0:
            raise ValueError(f"{name} is a whole number of at least 0, not {value:g}")
        return int(value)
    if isnan(value) or value < 0:
        raise ValueError(f"{name} must be at least 0, not {value:g}")
    return value
