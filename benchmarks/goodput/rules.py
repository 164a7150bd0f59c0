"""The rules of the law of placement, and what switches each of them off alone.

`python -m benchmarks.goodput ablate` reads them. `off` names fields of `SchedulerTuning`, of `ScheduleConfig` behind `schedule.`,
and of `CoarseConfig` behind `sim.`. A rule's own case is a kind of load (`benchmarks.goodput.ablation_loads`), and of it a group
of requests: `all`, those of the highest `class`, or those of the `light` half of the tenants. What the coarse simulation does
not have is not here: instances that learn their steps (ADR 096), and pools that grow and shrink."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Final

MOST: Final = 1 << 30
"""A count that nothing reaches."""
A_LOT, ALMOST_NONE = 1e9, 1e-9
"""For infinite and none where these are multiplied with what may be 0, or divided by."""


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    record: str
    """The decision record that made it; empty where none tells of it alone."""
    off: Mapping[str, float | bool]
    case: str
    about: str
    group: str = "all"


RULES: Final = (
    Rule("levels again", "017", {"seen_above": False}, "classes", "look again as though lower classes were gone", "class"),
    Rule("lower sit out", "017", {"class_share": inf}, "classes", "lower classes leave steps that higher ones need", "class"),
    Rule("least share", "017", {"least_share": ALMOST_NONE}, "classes", "what falls behind a quarter of its pace takes part"),
    Rule("ageing", "017", {"schedule.aging_s": 0.0}, "classes", "a line that waits for long ranks higher"),
    Rule("hopeless refused", "024", {"overload_s": -inf}, "hopeless", "refuse what none could serve in time"),
    Rule("late yield", "024", {"late_yield": False}, "sustained", "late prompts let others pass on an instance"),
    Rule("late last", "", {"late_last": False}, "sustained", "the queue tries late ones after others"),
    Rule("links learned", "026", {"learns_links": False}, "links", "links are as fast as was measured"),
    Rule("links reserved", "026", {"reserves_links": False}, "links", "placed bytes count on their link"),
    Rule("links cost", "029", {"link_share": 0.0}, "links", "a link's time costs a share of GPU time"),
    Rule("cheap prefill", "029", {"prefill_only_price": 1.0}, "pools", "the time of a prefill instance costs a tenth"),
    Rule("risk", "029", {"risk_weight": 0.0}, "sustained", "a place costs more the nearer its prediction is to a target"),
    Rule("delay costs", "029", {"delay_weight": 0.0}, "sustained", "a second until the first token costs a tenth"),
    Rule("late delay costs", "029", {"late_weight": 0.0}, "sustained", "the same for late requests, in full"),
    Rule("late binding", "", {"binds_late": False}, "sustained", "prompts wait in the scheduler, not on instances"),
    Rule("floor of targets", "", {"reach": 0.0}, "sustained", "no target is tighter than one and a half steps alone"),
    Rule("early prompts", "030", {"early_s": -inf}, "pools", "compute prompts before slots are free"),
    Rule("fair early lines", "030", {"fair_early": False}, "pools", "nobody gets in line for slots before those who must wait"),
    Rule("short roam", "035", {"short_roam": False}, "pools", "short prompts go elsewhere where no slot is free"),
    Rule("short stay", "035", {"schedule.local_threshold_tokens": 0}, "pools", "short prompts are computed where they decode"),
    Rule("backlogs hurry", "036", {"backlog_gain": 0.0}, "sustained", "steps get longer while prompts wait behind others"),
    Rule("gainful steps", "", {"gainful": A_LOT}, "sustained", "steps get no longer than prompts gain by it"),
    Rule("catching up", "", {"catch_up_gain": 0.0}, "sustained", "prompts go on beside sequences that are behind"),
    Rule("spread", "040", {"alike": False}, "bursts", "the first sequence of a batch costs what others do"),
    Rule("errors", "044", {"sure_errors": 0.0}, "sustained", "predictions count with what they may be off by"),
    Rule("hopeless give way", "052", {"hopeless_give_way": False}, "hopeless", "hopeless prompts have the next lower priority"),
    Rule("easy steps", "055", {"easy_share": 0.0}, "sustained", "a step may always take a tenth of the pace"),
    Rule("running lengths", "059", {"learns_running": False}, "bursts", "lengths are learned from outputs that still run"),
    Rule("experts read", "060", {"sim.knows_experts": False}, "experts", "a step reads the experts that its tokens use"),
    Rule("later contexts", "064", {"foresees_contexts": False}, "sustained", "room is kept for what sequences will hold"),
    Rule("chance of length", "064", {"chance": 0.0}, "sustained", "and for outputs that get longer than expected"),
    Rule("margin of steps", "064", {"tpot_margin": 1.0}, "sustained", "batches are filled to 0.99 of the target"),
    Rule("spare blocks", "030", {"spare_tokens": 0}, "sustained", "newcomers leave each running sequence a block"),
    Rule("lent blocks", "066", {"overcommit_share": 0.0, "pauses_s": inf, "counts_s": inf}, "host", "who is ahead lends blocks"),
    Rule("late leave half", "067", {"late_share": 0.0}, "overload", "late requests leave half of an instance"),
    Rule("shares first", "072", {"credit": A_LOT}, "tenants", "shares come before deadlines", "light"),
    Rule("deferral", "", {"sure_share": ALMOST_NONE}, "overload", "the dearest prompts are deferred under overload"),
    Rule("claims", "", {"patience_s": inf}, "hopeless", "an instance is kept for what finds no room for a second"),
    Rule("deadline order", "", {"due_s": 0.0}, "classes", "a line is in the order of deadlines"),
    Rule("foreseen waits", "", {"drain_least_s": inf}, "overload", "refuse at once what would wait too long"),
    Rule("fetched prefixes", "", {"fetch_tokens": MOST}, "pools", "prefixes are fetched from other decode instances"),
    Rule("heads hold up", "", {"max_passed": MOST}, "overload", "32 large requests at the head hold small ones up"),
)  # fmt: skip
