"""Every constant of the law of placement says its unit, its range and why, and is in that range."""

from dataclasses import fields, replace

from benchmarks.goodput.ablation_runs import constants
from benchmarks.goodput.rules import RULES
from core.config.cluster_config import ScheduleConfig
from core.scheduler_tuning import DEFAULT_TUNING, SchedulerTuning
from sim.coarse.world import CoarseConfig

NUMBERS = {
    field.name for field in fields(SchedulerTuning) if type(getattr(DEFAULT_TUNING, field.name)) is not bool
}


def test_every_number_has_a_unit_a_range_and_a_reason() -> None:
    assert {constant.name for constant in constants()} == NUMBERS
    for constant in constants():
        assert constant.unit, constant
        assert constant.why.endswith("."), constant
        assert constant.least <= constant.value <= constant.most, constant
        assert all(constant.least <= other <= constant.most for other in constant.others.values()), constant


def test_every_switch_is_on_and_is_what_a_rule_turns_off() -> None:
    switches = {field.name for field in fields(SchedulerTuning)} - NUMBERS
    assert all(getattr(DEFAULT_TUNING, name) is True for name in switches)
    assert switches == {name for rule in RULES for name, value in rule.off.items() if value is False} - {
        "sim.knows_experts"
    }


def test_every_rule_is_switched_off_by_what_there_is_to_another_value() -> None:
    for rule in RULES:
        for name, value in rule.off.items():
            scope, _, field = name.rpartition(".")
            whole = {"": DEFAULT_TUNING, "schedule": ScheduleConfig(), "sim": CoarseConfig()}[scope]
            assert getattr(whole, field) != value, rule
        replace(DEFAULT_TUNING, **{n: v for n, v in rule.off.items() if "." not in n})  # type: ignore[arg-type]
    assert len({rule.name for rule in RULES}) == len(RULES)
