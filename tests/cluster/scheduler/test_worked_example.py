"""What docs/architecture/placement.md says: constants as they are, and an example that policy and formulas agree on."""

import re
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from cluster.scheduler.fleet.member import Member
from cluster.scheduler.placement.load_forecast import decode_step_s
from cluster.scheduler.placement.placement_policy import PlacementChoice, PlacementQuery
from cluster.scheduler.placement.slo_policy import SloPolicy
from core.scheduler_tuning import DEFAULT_TUNING
from core.types import Slo
from tests.cluster.scheduler.routing_world import World, instance, report
from tests.cluster.scheduler.test_slo_policy import STEPS

PAGE: Final = Path(__file__).parents[3] / "docs/architecture/placement.md"
OUTPUT, SHORT_OUTPUT, KV_TOKEN_BYTES, LINK_BYTES_PER_S = 256, 40, 131_072, 2.5e9
HANDOVER_S: Final = 0.003


class Row(NamedTuple):
    place: str
    ttft_ms: float
    step_ms: float
    gpu_ms: float
    risk: float
    cost_ms: float


def page() -> list[Row]:
    rows = re.findall(r"^\| (.+) \|$", PAGE.read_text().replace("**", ""), re.MULTILINE)
    cells = [row.split(" | ") for row in rows]
    return [Row(c[0], *map(float, c[1:])) for c in cells if re.search(r"^[abp] (alone|for)", c[0])]


class Example:
    def __init__(self) -> None:
        kind = {
            "num_blocks": 20_000,
            "max_batch_tokens": 8192,
            "max_num_seqs": 256,
            "kv_token_bytes": KV_TOKEN_BYTES,
        }
        seen = {"tokens_per_s": 35_000.0, "step_s": 0.01, "steps": STEPS}
        world = World(
            *(
                instance(name, role, sends=True, **kind)
                for name, role in zip("abp", ("pd", "pd", "p"), strict=True)
            )
        )
        world.on(
            report("a", free_blocks=8000, num_running=120, num_decoding=120, context_tokens=180_000, **seen)
        )
        world.on(
            report(
                "b",
                free_blocks=18_000,
                num_running=20,
                num_decoding=20,
                context_tokens=30_000,
                waiting_tokens=6000,
                **seen,
            )
        )
        world.on(report("p", free_blocks=20_000, waiting_tokens=3000, **seen))
        self.members = {member.address: member for member in world.scheduler.members}
        self.policy = SloPolicy(local_threshold_tokens=32)
        for member in self.members.values():
            self.policy.measured(member)

    def choose(self, decodes: Sequence[str], prefills: Sequence[str], ttft_s: float = 0.5) -> PlacementChoice:
        slo = Slo(name="x", ttft_s=ttft_s, tpot_s=0.03)
        ask = PlacementQuery(
            4000, {}, slo=slo, due_at=100.0 + ttft_s, expected_tokens=OUTPUT, short_tokens=SHORT_OUTPUT
        )
        found = self.policy.choose(
            ask, [self.members[n] for n in decodes], [self.members[n] for n in prefills], 100.0
        )
        assert found is not None
        return found

    def by_formula(self, decode: Member, source: Member) -> Row:
        """Return a row by the formulas of the page alone."""
        there = self.policy.forecast(source)
        work_s = there.prompt_s(4000)
        ttft_s = 1.5 * source.step_s + there.queue_s + work_s
        off = 2 / sqrt(SHORT_OUTPUT) * STEPS.decode.error
        step_s = decode_step_s(STEPS.decode, decode, 1, 4000) * (1 + off)
        adds_s = STEPS.decode.step_s(1, 4000 + OUTPUT / 2, 1) - STEPS.decode.fixed_s
        link_s = 0.0 if source is decode else 4000 * KV_TOKEN_BYTES / LINK_BYTES_PER_S
        after_s = 0.0 if source is decode else HANDOVER_S + max(0.0, link_s - work_s)
        wait_s = 0.0 if source is decode else after_s + self.policy.forecast(decode).joins_s(ttft_s)
        risk = max(ttft_s / (0.9 * 0.5), step_s / 0.03 + wait_s / (SHORT_OUTPUT * 0.03))
        gpu_s = OUTPUT * adds_s + (work_s if source.decodes else 0.1 * work_s) + 0.1 * link_s
        cost_s = gpu_s * (1 + 2 * risk**4) + 0.1 * (ttft_s + after_s)
        name = f"{decode.address} alone" if source is decode else f"{source.address} for {decode.address}"
        return Row(name, 1e3 * ttft_s, 1e3 * step_s, 1e3 * gpu_s, risk, 1e3 * cost_s)


@pytest.mark.parametrize("row", page(), ids=lambda row: row.place)
def test_the_page_shows_what_the_policy_computes(row: Row) -> None:
    example = Example()
    source, decode = row.place[0], row.place[-1] if " for " in row.place else row.place[0]
    expected = example.by_formula(example.members[decode], example.members[source])
    assert row[1:] == pytest.approx(expected[1:], rel=0.01)
    choice = example.choose([decode], [] if source == decode else [source])
    assert choice.computes.address == source
    assert 1e3 * choice.cost_s == pytest.approx(expected.cost_ms)


def test_the_cheapest_place_of_the_page_is_taken_and_a_tighter_target_takes_another() -> None:
    example = Example()
    cheapest = min(page(), key=lambda row: row.cost_ms)
    choice = example.choose("ab", "pab")
    assert f"{choice.computes.address} for {choice.decode.address}" == cheapest.place
    assert example.choose("ab", "pab", ttft_s=0.2).computes.address == "a"


def test_the_page_gives_constants_as_they_are() -> None:
    named = re.findall(r"\*(\w+)\* ([\d.]+\d|\d)", PAGE.read_text().replace("**", ""))
    assert len(named) > 20
    assert {name: float(value) for name, value in named} == {
        name: getattr(DEFAULT_TUNING, name) for name, _ in named
    }
