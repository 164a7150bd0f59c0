"""When the scheduler has the model's instances sleep, when it wakes them, and what those who ask meanwhile are told."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cluster.scheduler.scheduler_events import OperatorAsked, PeerLost, Send, Tick
from core.config.residency_config import ResidencyConfig
from core.messages import Finished, PlaceReply, Rejected
from core.sleep_messages import (
    AskSleep,
    AskWake,
    Asleep,
    GoToSleep,
    GroupOrder,
    KeepAwake,
    SleepAnswer,
    SleepState,
    WakeUp,
)
from core.types import Slo
from tests.cluster.scheduler.routing_world import World, ask, instance


def asleep(address: str, state: SleepState = "asleep", *, held: bool = False, wake_s: float = 2.0) -> Asleep:
    return Asleep(
        address=address,
        state=state,
        level=1,
        prefills=address[0] == "p",
        decodes=address[0] == "d",
        held=held,
        wake_s=wake_s,
    )


def sleepy(*addresses: str, mode: Any = "on_demand", longest_wait_s: float = 60.0, **config: Any) -> World:
    """A world with these instances, which sleep after 60 s."""
    residency = ResidencyConfig(**{"mode": mode, "idle_s": 60, "least_awake_s": 0, **config})
    there = [instance(address, address[0]) for address in addresses]
    return World(*there, residency=residency, max_queue_wait_s=longest_wait_s)


def falls_asleep(world: World, *addresses: str, held: bool = False, wake_s: float = 2.0) -> None:
    for address in addresses:
        world.on(asleep(address, "falling asleep", held=held, wake_s=wake_s))
    for address in addresses:
        world.on(asleep(address, held=held, wake_s=wake_s))


def told(sends: Sequence[Send], kind: type[Any]) -> list[str]:
    return [send.to for send in sends if isinstance(send.message, kind)]


def test_all_instances_sleep_once_nobody_has_asked_for_long() -> None:
    world = sleepy("d", "p")
    world.on(Tick())
    assert not world.on(Tick(), 59)
    assert told(world.on(Tick(), 1.1), GoToSleep) == ["d", "p"]
    assert not world.on(Tick(), 100), "they are told once"


def test_a_request_that_runs_keeps_them_awake_and_time_counts_from_its_end() -> None:
    world = sleepy("d")
    world.placed(ask("a"))
    assert not world.on(Tick(), 1000)
    world.on(Finished("a", 0))
    assert not world.on(Tick(), 59)
    assert told(world.on(Tick(), 1.1), GoToSleep) == ["d"]


def test_what_has_just_woken_up_stays_awake_for_a_while() -> None:
    world = sleepy("d", idle_s=1, least_awake_s=50)
    world.on(Tick())
    assert not world.on(Tick(), 49)
    assert told(world.on(Tick(), 1.1), GoToSleep) == ["d"]


def test_a_client_says_how_long_the_model_stays_awake() -> None:
    world = sleepy("d")
    world.on(KeepAwake(float("inf")))
    assert not world.on(Tick(), 1e6)
    assert not world.on(KeepAwake(0.0)), "the request is still on its way"
    assert told(world.on(Tick(), 1.1), GoToSleep) == ["d"]


def test_nobody_sleeps_of_itself_unless_it_is_asked_to() -> None:
    for mode in ("always", "manual"):
        world = sleepy("d", mode=mode)
        world.on(Tick())
        assert not world.on(Tick(), 1e6)
        assert not world.scheduler.needs_time


def test_a_request_for_a_sleeping_model_wakes_all_instances_and_is_placed_when_one_serves() -> None:
    world = sleepy("d", "p")
    falls_asleep(world, "d", "p")
    assert world.scheduler.why_not() == "", "a request would be answered"
    assert not world.scheduler.members
    assert told(world.on(ask("a")), WakeUp) == ["d", "p"]
    assert not world.on(ask("b")), "they are told once"
    world.on(asleep("d", "waking"))
    placed = [s.message for s in world.on(instance("d")) if isinstance(s.message, PlaceReply)]
    assert [reply.request_id for reply in placed] == ["a", "b"]


def test_one_that_is_falling_asleep_is_woken_as_well() -> None:
    world = sleepy("d")
    world.on(asleep("d", "falling asleep"))
    assert told(world.on(ask("a")), WakeUp) == ["d"]
    assert not world.on(asleep("d")), "it knows"


def test_requests_wait_for_a_waking_model_as_long_as_for_a_place() -> None:
    world = sleepy("d")
    falls_asleep(world, "d", wake_s=20)
    world.on(ask("a"))
    assert not world.on(Tick(), 59), "5 s without any instance end nothing while one wakes up"
    assert "no place was free" in world.rejected(Tick(), 2).reason


def test_a_class_that_would_wait_too_long_is_refused_with_the_time_until_the_model_is_awake() -> None:
    world = sleepy("d", longest_wait_s=10)
    falls_asleep(world, "d", wake_s=25)
    first, refusal = world.on(ask("a"))
    assert isinstance(first.message, WakeUp), "who comes again finds it awake"
    assert refusal.message.asleep  # type: ignore[union-attr]
    assert refusal.message.retry_after_s == 25  # type: ignore[union-attr]
    later = world.rejected(ask("b"), 12)
    assert later.retry_after_s == pytest.approx(13), "what is left"
    assert not world.on(ask("c"), 12), "it wakes up soon enough"


def test_where_other_models_have_the_memory_the_time_of_the_last_swaps_is_predicted() -> None:
    world = sleepy("d", group="card", longest_wait_s=4.0)
    falls_asleep(world, "d")

    def refused(name: str, after_s: float) -> Rejected | None:
        """Return the answer to a request that comes while another model has the memory."""
        sends = world.on(ask(name), after_s)
        return next((send.message for send in sends if isinstance(send.message, Rejected)), None)

    def swapped(number: int, after_s: float) -> None:
        """The others make way, and the model wakes up and falls asleep again."""
        assert told(world.on(GroupOrder(1, number, True), after_s), WakeUp) == ["d"]
        world.on(instance("d"), 1.0)
        world.on(GroupOrder(1, number + 1, False), 100.0)
        falls_asleep(world, "d")

    assert refused("first", 0.0) is None, "nothing is known but that waking takes 2 s"
    swapped(1, 9.0)
    answer = refused("second", 1.0)
    assert answer is not None
    assert (answer.asleep, answer.retry_after_s) == (True, 10.0)
    answer = refused("third", 4.0)
    assert answer is not None
    assert answer.retry_after_s == 6.0, "it has been asked for since 4 s"
    swapped(3, 1.0)
    answer = refused("fourth", 1.0)
    assert answer is not None
    assert answer.retry_after_s == 8.0, "half of 10 s and half of 6 s"


def test_a_class_that_refuses_what_is_hopeless_waits_no_longer_than_its_target() -> None:
    world = sleepy("d")
    falls_asleep(world, "d", wake_s=3)
    event = ask("a")
    slo = Slo(name="chat", ttft_s=2.0, tpot_s=0.1, hopeless="refuse")
    refusal = world.on(replace(event, place=replace(event.place, slo=slo)))[-1].message
    assert isinstance(refusal, Rejected)
    assert "'chat' does not wait" in refusal.reason
    assert not world.on(ask("b"))


def test_what_was_paused_waits_for_as_long_as_the_model_sleeps() -> None:
    world = sleepy("d", mode="manual")
    world.placed(ask("a"))
    world.on(asleep("d", "falling asleep", held=True))
    world.on(Finished("a", 0))
    assert not world.on(ask("a", attempt=1))
    world.on(asleep("d", held=True))
    assert not world.on(Tick(), 1e5)
    (send,) = world.on(instance("d"))
    assert isinstance(send.message, PlaceReply)


def test_a_model_that_an_operator_has_sleep_is_woken_by_operators_alone() -> None:
    world = sleepy("d", "p", mode="manual")
    sends = world.on(OperatorAsked("f", AskSleep(nonce=7, level=2, timeout_s=5)))
    assert told(sends, GoToSleep) == ["d", "p"]
    assert [s.message for s in sends if s.to == "f"] == [SleepAnswer(7)]
    assert all(s.message.held and s.message.level == 2 for s in sends[:2])  # type: ignore[union-attr]
    falls_asleep(world, "d", "p", held=True)
    refused = world.rejected(ask("a"))
    assert refused.asleep
    assert refused.retry_after_s == 0
    assert "/wake_up" in world.scheduler.why_not()
    assert told(world.on(OperatorAsked("f", AskWake(8))), WakeUp) == ["d", "p"]
    assert world.scheduler.why_not() == "", "they wake up"


def test_a_model_that_is_always_awake_does_not_sleep_for_operators() -> None:
    world = sleepy("d", mode="always")
    (send,) = world.on(OperatorAsked("f", AskSleep(nonce=1, level=1)))
    assert "schedule.residency.mode is always" in send.message.why  # type: ignore[union-attr]


def test_a_sleeping_instance_that_is_lost_is_waited_for_as_any_other() -> None:
    world = sleepy("d")
    falls_asleep(world, "d")
    world.on(ask("a"))
    world.on(PeerLost("d"))
    world.on(Tick())
    assert "no decode instance" in world.rejected(Tick(), 5.1).reason


def test_a_scheduler_that_comes_while_all_sleep_wakes_them_too() -> None:
    world = sleepy()
    world.on(asleep("d"))
    assert told(world.on(ask("a")), WakeUp) == ["d"]


def test_time_asleep_says_nothing_of_how_fast_requests_are_served() -> None:
    world = sleepy("d")
    falls_asleep(world, "d", wake_s=50.0)
    for number in range(9):
        world.on(ask(f"r{number}", ttft_s=100))
    served = told(world.on(instance("d", "d", max_num_seqs=1), 50), PlaceReply)
    assert len(served) == 1, "the others wait for its only slot"
    assert not told(world.on(ask("new", ttft_s=100)), Rejected)
