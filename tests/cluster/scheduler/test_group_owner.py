"""The owner of the memory that models share: it never gives away what may be in use, also when it or a scheduler is new."""

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scheduler.residency.group_owner import GroupOwner
from cluster.scheduler.scheduler_events import OperatorAsked, PeerLost, Tick
from core.messages import Rejected
from core.sleep_messages import (
    ArrivedDemand,
    AskWake,
    Asleep,
    GoToSleep,
    GroupOrder,
    ModelDemand,
    WaitingDemand,
    WakeUp,
)
from net.codec import decode, encode
from tests.cluster.scheduler.routing_world import ask, instance
from tests.cluster.scheduler.test_residency import asleep, sleepy, told

NAMES: tuple[str, ...] = ("a", "b", "c")


class Group:
    """Three models, memory for one, and their owner. Words take as long as the test wants."""

    def __init__(self) -> None:
        self.now, self.epoch = 0.0, 1
        self.owner = GroupOwner(NAMES, 1, self.epoch)
        self.states: dict[str, Any] = dict.fromkeys(NAMES, "asleep")
        self.orders: dict[str, tuple[int, int]] = dict.fromkeys(NAMES, (0, 0))
        self.waits: dict[str, int] = dict.fromkeys(NAMES, 0)
        self.mail: list[tuple[str, GroupOrder]] = []
        self.reports: list[ModelDemand] = []

    def report(self, name: str) -> None:
        waiting = (WaitingDemand(0, self.waits[name], 30.0),) if self.waits[name] else ()
        demand = ModelDemand(model=name, state=self.states[name], order=self.orders[name], waiting=waiting)
        self.reports.append(demand)

    def hear(self) -> None:
        for demand in self.reports:
            self.mail += self.owner.on(demand, self.now)
        self.reports.clear()

    def obey(self) -> None:
        for name, order in self.mail:
            if (order.epoch, order.number) > self.orders[name]:
                self.orders[name] = (order.epoch, order.number)
                if order.awake is not None:
                    self.states[name] = "serving" if order.awake else "asleep"
                    self.waits[name] *= not order.awake
        self.mail.clear()

    def settle(self) -> None:
        for _ in range(6):
            for name in NAMES:
                self.report(name)
            self.hear()
            self.obey()

    @property
    def awake(self) -> list[str]:
        return [name for name, state in self.states.items() if state != "asleep"]


def test_the_first_models_wake_up_at_the_start_and_others_when_they_are_asked_for() -> None:
    group = Group()
    group.settle()
    assert group.awake == ["a"]
    group.waits["c"] = 1
    group.settle()
    assert group.awake == ["c"]


def test_nothing_is_decided_before_all_schedulers_have_spoken() -> None:
    group = Group()
    for _ in range(3):
        group.report("a")
        group.report("b")
        group.hear()
        group.obey()
    assert not group.awake


def test_an_owner_that_comes_later_has_all_obey_before_it_decides() -> None:
    group = Group()
    group.settle()
    group.waits["b"] = 1
    old = group.owner
    group.owner = GroupOwner(NAMES, 1, 2)
    group.report("b")
    late = [
        each for name in NAMES for each in old.on(ModelDemand(model=name, state="asleep", order=(1, 9)), 0)
    ]
    group.settle()
    assert group.awake == ["b"]
    group.mail = [*late, ("c", GroupOrder(1, 99, awake=True))]
    group.obey()
    assert group.awake == ["b"], "nobody obeys the old one"


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["report", "ask"]), st.sampled_from(NAMES)),
            st.sampled_from([("hear", ""), ("obey", ""), ("new owner", ""), ("time", "")]),
        ),
        max_size=60,
    )
)
def test_whatever_is_on_its_way_memory_is_never_overdrawn(steps: list[tuple[str, str]]) -> None:
    group = Group()
    for step, name in steps:
        match step:
            case "report":
                group.report(name)
            case "ask":
                group.waits[name] += 1
            case "hear":
                group.hear()
            case "obey":
                group.obey()
            case "new owner":
                group.epoch += 1
                group.owner = GroupOwner(NAMES, 1, group.epoch)
            case _:
                group.now += 5.0
        assert len(group.awake) <= 1
    group.settle()
    assert len(group.awake) == 1


def test_an_owner_whose_clock_is_behind_is_obeyed_all_the_same() -> None:
    group = Group()
    group.epoch = 7
    group.owner = GroupOwner(NAMES, 1, 7)
    group.settle()
    group.owner = GroupOwner(NAMES, 1, 3)
    group.waits["b"] = 1
    group.settle()
    group.settle()
    assert group.awake == ["b"]


def test_a_held_model_has_no_memory_and_gets_none() -> None:
    group = Group()
    group.states["a"] = "held"
    group.settle()
    assert group.awake == ["a", "b"], "the next one in the table wakes up in its place"
    assert group.states["a"] == "held"
    group.waits["a"] = 3
    group.settle()
    assert group.states == {"a": "held", "b": "serving", "c": "asleep"}


def test_a_model_that_has_lost_its_instances_asks_for_memory_anew() -> None:
    world = sleepy(group="g")
    world.on(asleep("d"))
    world.on(GroupOrder(1, 1, awake=True))
    world.on(instance("d", "d"))
    world.on(PeerLost("d"))
    assert not told(world.on(asleep("e")), WakeUp), "others may have its memory"
    assert world.scheduler.demand("m", 1, world.now).state == "asleep"
    assert not told(world.on(ask("r")), WakeUp)
    assert told(world.on(GroupOrder(1, 2, awake=True)), WakeUp) == ["e"]


def test_a_model_that_rests_refuses_and_says_why_until_an_operator_wakes_it() -> None:
    world = sleepy(group="g")
    world.on(ask("early"))
    world.on(replace(asleep("d"), held=True, why="its file is damaged"))
    [refused] = [each.message for each in world.on(Tick()) if isinstance(each.message, Rejected)]
    assert (refused.request_id, refused.asleep) == ("early", True)
    assert world.scheduler.demand("m", 1, world.now).state == "held"
    assert "since its file is damaged" in world.scheduler.why_not()
    assert not told(world.on(GroupOrder(1, 1, awake=True)), WakeUp)
    world.on(OperatorAsked("f", AskWake(1)))
    assert world.scheduler.demand("m", 1, world.now).state == "asleep"
    assert told(world.on(GroupOrder(1, 2, awake=True)), WakeUp) == ["d"]


def test_an_instance_that_rests_keeps_its_model_from_nothing() -> None:
    world = sleepy(group="g")
    world.on(asleep("d"))
    world.on(GroupOrder(1, 1, awake=True))
    world.on(instance("d", "d"))
    assert not told(world.on(replace(asleep("e"), held=True, why="it fails")), WakeUp)
    assert world.scheduler.demand("m", 2, world.now).state == "serving"


def test_a_model_of_a_group_wakes_up_when_its_owner_says_so() -> None:
    world = sleepy(group="g")
    world.on(asleep("d"))
    assert not world.on(ask("r")), "it waits"
    demand = world.scheduler.demand("m", 1, world.now)
    assert (demand.state, demand.waiting[0].num, demand.arrived[0].num) == ("asleep", 1, 1)
    assert told(world.on(GroupOrder(1, 1, awake=True)), WakeUp) == ["d"]
    assert world.scheduler.demand("m", 1, world.now).state == "waking"
    world.on(instance("d", "d"), 2.0)
    demand = world.scheduler.demand("m", 1, world.now)
    assert (demand.state, demand.wake_s, demand.num_running, demand.order) == ("serving", 2.0, 1, (1, 1))
    assert told(world.on(GroupOrder(1, 2, awake=False)), GoToSleep) == ["d"]
    assert world.scheduler.demand("m", 1, world.now).state == "falling asleep"
    assert not world.on(GroupOrder(1, 2, awake=True)), "an old order"
    world.on(Asleep(address="d", state="asleep", level=1, prefills=True, decodes=True))
    assert world.scheduler.demand("m", 1, world.now).state == "asleep"
    assert world.scheduler.demand("m", 2, world.now).state == "unknown", "one has not spoken"
    assert not told(world.on(Tick(), 10), WakeUp)


def test_words_of_a_group_are_read_as_they_were_written() -> None:
    waiting, arrived = (WaitingDemand(1, 2, -3.5),), (ArrivedDemand(1, float("inf"), 4),)
    demand = ModelDemand(model="m", state="waking", order=(1, 2), waiting=waiting, arrived=arrived, age=0.5)
    for message in (demand, GroupOrder(1, 2, awake=None), GroupOrder(1, 2, awake=True)):
        assert decode(encode(message)) == message
