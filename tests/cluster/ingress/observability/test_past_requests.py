"""The last hour and the requests that have ended, as the ingress keeps them."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.ingress.telemetry import ended_requests
from cluster.ingress.telemetry.ended_requests import EndedRequests
from cluster.ingress.telemetry.last_hour import NUM_SLOTS, SLOT_S, LastHour
from cluster.ingress.telemetry.last_minute import quantile
from cluster.ingress.telemetry.timeline import Attempt, Timeline
from core.messages import HandedOver, HandoverTimes
from core.types import Request, Route, SamplingParams, Slo

CHAT = Slo(name="chat", ttft_s=1.0, tpot_s=0.1)
NOW = 1_000_000.0


def ended(
    request_id: str = "r",
    *,
    placed_s: float = 0.1,
    first_s: float = 0.3,
    took_s: float = 1.0,
    gap_s: float = 0.0,
    exposed_s: float = 0.0,
    queue_s: float = 0.0,
    lost: str = "",
    error: str = "",
    slo: Slo = CHAT,
    at: float = NOW,
) -> Timeline:
    began_at = at - took_s
    request = Request(
        id=request_id, prompt=(1, 2, 3), sampling=SamplingParams(max_tokens=20), reply_to="me", slo=slo
    )
    handed = HandedOver(request_id, 0, 1 << 20, HandoverTimes("tcp", queue_s, 0.01, exposed_s))
    attempt = Attempt(number=0, started_at=began_at, route=Route("d", "p"), placed_at=began_at + placed_s)
    attempt.first_token_at, attempt.ended_at, attempt.lost = began_at + first_s, at, lost
    attempt.longest_gap_s, attempt.handed_over = gap_s, handed
    return Timeline(
        request=request,
        started_at=began_at,
        attempts=[attempt],
        num_output=11,
        ended_at=at,
        error=error,
        error_type="",
    )


@pytest.mark.parametrize(
    ("timeline", "why"),
    [
        (ended(placed_s=2.0, first_s=2.5, took_s=3), "it waited 2.0 s for a place"),
        (ended(first_s=2.5, took_s=3), "its prompt took 2.4 s at p"),
        (ended(first_s=2.5, took_s=3, queue_s=1.2), "its prompt took 2.4 s at p, 1.2 s of it in a queue"),
        (ended(took_s=9, gap_s=0.9), "its steps were slow at d, 900 ms at the most"),
        (ended(took_s=9, gap_s=7), "no token came for 7.0 s from d"),
        (ended(took_s=9, exposed_s=5), "its KV came 5.0 s behind the first token"),
        (ended(first_s=2.5, took_s=3, lost="d9"), "its prompt took 2.4 s at p; it went on after d9 was lost"),
        (ended(error="nobody has room"), "nobody has room"),
    ],
)
def test_what_took_longest_is_said(timeline: Timeline, why: str) -> None:
    kept = EndedRequests()
    kept.observe(timeline)
    assert [one.why for one in kept.find("r")] == [why]


def test_the_slowest_come_first_and_failures_and_old_ones_apart() -> None:
    kept = EndedRequests()
    free = Slo(name="free", ttft_s=inf, tpot_s=inf)
    kept.observe(ended("old", took_s=99, at=NOW - ended_requests.WINDOW_S - 1))
    kept.observe(ended("fine"))
    kept.observe(ended("late", first_s=3.0, took_s=4))
    kept.observe(ended("no targets", first_s=3.0, took_s=4, slo=free))
    kept.observe(ended("broken", error="lost"))
    assert [one.id for one in kept.slowest(NOW)] == ["late", "fine", "no targets"]
    assert [one.attained for one in kept.slowest(NOW)] == [False, True, True]
    assert [one.id for one in kept.failed(NOW)] == ["broken"]
    assert kept.find("old")[0].attempts[0].ended_s == 99


def test_of_many_requests_the_latest_are_kept() -> None:
    kept = EndedRequests()
    for number in range(ended_requests.NUM_KEPT + 1):
        kept.observe(ended(str(number)))
    assert not kept.find("0")
    assert kept.find("1")


@given(st.lists(st.floats(0.001, 50), min_size=1, max_size=80), st.sampled_from([0.5, 0.99]))
def test_quantiles_of_a_slot_are_those_of_its_requests_within_a_twentieth(
    times: list[float], q: float
) -> None:
    hour = LastHour()
    for first_s in times:
        hour.observe(ended(first_s=first_s, took_s=first_s + 1))
    (chat,) = hour.history(NOW)["classes"]
    assert chat["ended"][-1] == len(times)
    exact = quantile(times, q)
    assert exact is not None
    assert chat[f"ttft_p{round(100 * q)}_s"][-1] == pytest.approx(exact, rel=0.05)


def test_an_hour_is_kept_and_what_has_no_requests_is_empty() -> None:
    hour = LastHour()
    for ago_s in (NUM_SLOTS * SLOT_S, 1800, 0):
        hour.observe(ended(at=NOW - ago_s, error="x" if ago_s else ""))
    (chat,) = hour.history(NOW)["classes"]
    at = [slot for slot, count in enumerate(chat["ended"]) if count]
    assert at == [NUM_SLOTS - 1 - 1800 // SLOT_S, NUM_SLOTS - 1]
    assert [chat[name][at[0]] for name in ("attained", "failed", "output_tokens")] == [0, 1, 11]
    assert chat["tpot_p50_s"][0] is None
    assert (chat["ttft_target_s"], chat["tpot_target_s"]) == (1.0, 0.1)
    assert not hour.history(NOW + 2 * NUM_SLOTS * SLOT_S)["classes"]
