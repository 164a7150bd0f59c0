"""The order of the queue, among tenants and within one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scheduler.placement.placement import Placement
from cluster.scheduler.queue.fairness import ServiceCounters
from cluster.scheduler.queue.waiting_queue import Waiter, WaitingQueue
from core.messages import PlaceRequest
from core.types import Route, Slo

AGING_S = 10.0


class Queue:
    """A queue whose only server takes the next in order."""

    def __init__(self, slack: float = 0.0, aging_s: float = AGING_S) -> None:
        self.counters = ServiceCounters(slack)
        self.queue = WaitingQueue(self.counters, aging_s)
        self.now, self.number = 0.0, 0

    def add(
        self, name: str, tenant: str = "", tokens: int = 100, weight: float = 1.0, **slo: float
    ) -> Waiter:
        self.number += 1
        target = Slo(**{"ttft_s": 2.0, **slo})  # type: ignore[arg-type]
        place = PlaceRequest(
            request_id=name,
            attempt=0,
            num_tokens=tokens,
            max_new_tokens=50,
            block_hashes=(),
            slo=target,
            tenant=tenant,
            weight=weight,
        )
        waiter = Waiter(name, "f", place, self.now, number=self.number, start_by=self.now + target.ttft_s)
        self.queue.add(waiter)
        return waiter

    def serve(self) -> str:
        waiter = next(self.queue.in_order(self.now))
        self.queue.served(waiter, self.now)
        self.counters.placed(waiter.place, 0.0)
        self.counters.ended(waiter.place)
        return waiter.key

    def names(self) -> list[str]:
        return [waiter.key for waiter in self.queue.in_order(self.now)]


def test_a_nearer_deadline_goes_first_within_a_tenant() -> None:
    queue = Queue()
    queue.add("long", ttft_s=10.0)
    queue.add("chat", ttft_s=1.0)
    queue.add("batch", ttft_s=3600.0, priority=-1)
    assert queue.names() == ["chat", "long", "batch"]


def test_what_is_late_waits_for_what_is_not() -> None:
    queue = Queue()
    queue.add("late", ttft_s=1.0)
    queue.now = 1.5
    queue.add("timely", ttft_s=1.0)
    assert queue.names() == ["timely", "late"]
    queue.queue.remove(queue.queue.get("late"))  # type: ignore[arg-type]
    assert queue.names() == ["timely"]


def test_what_keeps_others_from_being_in_time_is_set_aside_until_there_is_time_again() -> None:
    queue = Queue()
    for name, work_s in (("dear", 1.5), ("a", 0.4), ("b", 0.4), ("c", 0.4)):
        waiter = queue.add(name)
        waiter.work_s = work_s
        waiter.start_by = 2.0 - work_s
    queue.queue.shed(1, 0.0)
    assert queue.names() == ["a", "b", "c", "dear"]
    for name in ("b", "c"):
        queue.queue.remove(queue.queue.get(name))  # type: ignore[arg-type]
    queue.queue.shed(1, 0.1)
    assert queue.names() == ["dear", "a"]


def test_another_tenants_dear_prompts_are_its_own_affair() -> None:
    """Each has half of the instance: the cheap one's requests fit into its half, the other's do not."""
    queue = Queue()
    for name, tenant, work_s in (("x1", "x", 0.9), ("x2", "x", 0.9), ("y1", "y", 0.2), ("y2", "y", 0.2)):
        waiter = queue.add(name, tenant)
        waiter.work_s = work_s
        waiter.start_by = 2.0 - work_s
    queue.queue.shed(1, 0.0)
    assert [w.place.tenant for w in queue.queue if w.deferred] == ["x"]


def test_tenants_take_turns_by_tokens_not_by_requests() -> None:
    queue = Queue()
    for i in range(8):
        queue.add(f"big{i}", "big", tokens=400)
        queue.add(f"small{i}", "small", tokens=100)
    order = [queue.serve() for _ in range(10)]
    assert sum(name.startswith("small") for name in order) == 8
    assert sum(name.startswith("big") for name in order) == 2


def test_the_order_counts_what_it_has_yielded() -> None:
    queue = Queue()
    for i in range(40):
        queue.add(f"a{i}", "a")
    queue.add("b0", "b")
    assert queue.names().index("b0") <= 1


def test_service_follows_the_weights() -> None:
    queue = Queue()
    for i in range(60):
        queue.add(f"heavy{i}", "heavy", weight=3.0)
        queue.add(f"light{i}", "light")
    order = [queue.serve() for _ in range(40)]
    assert sum(name.startswith("heavy") for name in order) == 30


def test_shares_follow_what_waits_within_the_slack() -> None:
    """One for which ten times as much waits gets a half more than the other, and never more than that."""
    queue = Queue(slack=0.5)
    for i in range(100):
        queue.add(f"much{i}", "much").work_s = 0.1
        if i < 10:
            queue.add(f"little{i}", "little").work_s = 0.1
    queue.queue.shed(1, 0.0)
    order = [queue.serve() for _ in range(20)]
    assert sum(name.startswith("much") for name in order) == 12


def test_a_pause_earns_nothing() -> None:
    queue = Queue()
    queue.add("idle", "idler")
    queue.serve()
    for i in range(50):
        queue.add(f"busy{i}", "busy")
    for _ in range(40):
        queue.serve()
    for i in range(40):
        queue.add(f"idle{i}", "idler")
    order = [queue.serve() for _ in range(10)]
    assert sum(name.startswith("idle") for name in order) <= 6


def test_higher_classes_go_first_but_nobody_starves() -> None:
    queue = Queue()
    queue.add("batch", "b", ttft_s=3600.0, priority=-1)
    served_at = None
    for i in range(60):
        queue.now = float(i)
        queue.add(f"urgent{i}", "a", priority=1)
        if queue.serve() == "batch":
            served_at = queue.now
    assert served_at is not None
    assert 2 * AGING_S <= served_at <= 3 * AGING_S + 1


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_what_is_late_goes_before_what_is_timely_of_a_lower_class(tenant: str) -> None:
    queue = Queue()
    queue.add("late", "a", ttft_s=0.5, priority=2)
    queue.now = 5.0
    queue.add("batch", tenant, ttft_s=3600.0, priority=-1)
    assert queue.names() == ["late", "batch"]


def test_without_ageing_a_lower_class_waits_for_ever() -> None:
    queue = Queue(aging_s=0.0)
    queue.add("batch", ttft_s=3600.0, priority=-1)
    for i in range(1, 200):
        queue.now = float(i)
        queue.add(f"urgent{i}", "b", priority=1)
        assert queue.serve() == f"urgent{i}"


def test_one_tenants_classes_age_too() -> None:
    queue = Queue()
    queue.add("batch", ttft_s=3600.0, priority=-1)
    queue.now = 3 * AGING_S + 1
    queue.add("urgent", priority=1)
    assert queue.names() == ["batch", "urgent"]


def test_an_overfull_queue_refuses_whoever_fills_it() -> None:
    queue = Queue()
    queue.add("polite", "b")
    for i in range(20):
        queue.add(f"flood{i}", "a")
    queue.add("last", "b")
    last = queue.queue.last_refusable()
    assert last is not None
    assert last.key == "flood19"
    assert queue.queue.num_ahead(queue.queue.get("last")) <= 3  # type: ignore[arg-type]


def test_an_overfull_queue_refuses_the_late_before_those_that_can_still_make_it() -> None:
    queue = Queue()
    for i in range(3):
        queue.add(f"late{i}", ttft_s=1.0)
    queue.now = 2.0
    queue.add("timely", ttft_s=1.0)
    assert queue.names()[0] == "timely"
    last = queue.queue.last_refusable()
    assert last is not None
    assert last.key == "late2"


_moves = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("abc"), st.integers(1, 500), st.integers(-1, 2)),
        st.tuples(st.just("serve")),
        st.tuples(st.just("wait"), st.floats(0, 15)),
    ),
    max_size=60,
)


@given(_moves)
@settings(max_examples=150, deadline=None)
def test_everybody_is_in_the_order_exactly_once_and_can_leave(moves: list[tuple[object, ...]]) -> None:
    queue, inside = Queue(), set[str]()
    for number, move in enumerate(moves):
        match move:
            case ("add", str(tenant), int(tokens), int(priority)):
                queue.add(f"r{number}", tenant, tokens, priority=priority)
                inside.add(f"r{number}")
            case ("serve",) if inside:
                inside.discard(queue.serve())
            case ("wait", float(delay_s)):
                queue.now += delay_s
            case _:
                pass
        assert sorted(queue.names()) == sorted(inside)
        assert len(queue.queue) == len(inside)
        refused = queue.queue.last_refusable()
        assert (refused is None) == (not inside)


def test_a_tenant_that_is_far_behind_goes_first_though_its_request_is_late() -> None:
    queue = Queue()
    queue.add("late", "few", ttft_s=1.0)
    for number in range(10):
        queue.add(f"served{number}", "many", ttft_s=1.0)
    queue.now = 1.5
    queue.add("timely", "many", ttft_s=1.0)
    assert queue.names()[0] == "timely"
    for number in range(10):
        waiter = queue.queue.get(f"served{number}")
        assert waiter is not None
        queue.queue.served(waiter, queue.now)
        queue.counters.placed(waiter.place, 0.0)
    assert queue.names() == ["late", "timely"]
    late = queue.queue.get("late")
    assert late is not None
    assert (late.is_behind, late.claims_after_s) == (True, 0.0)


def test_a_tenant_alone_is_never_behind() -> None:
    queue = Queue()
    queue.add("late", ttft_s=1.0)
    late = queue.queue.get("late")
    assert late is not None
    for _ in range(10):
        queue.counters.placed(late.place, 0.0)
    queue.now = 1.5
    queue.add("batch", priority=-1)
    queue.add("timely")
    assert queue.names() == ["timely", "late", "batch"]
    assert not any(waiter.is_behind for waiter in queue.queue)


def test_what_a_tenant_is_behind_stays_while_its_requests_run() -> None:
    counters = ServiceCounters()
    places = {name: Queue().add(name, name, tokens=100).place for name in ("few", "many")}
    counters.placed(places["few"], 0.0)
    for _ in range(3):
        counters.placed(places["many"], 0.0)
    counters.raise_floor("few", {"many": 1})
    assert counters.of("few") == 100, "it runs"
    counters.ended(places["few"])
    counters.raise_floor("few", {"many": 1})
    assert counters.of("few") == 300, "it had paused"


def test_output_beyond_what_was_expected_is_charged_as_it_comes() -> None:
    place = Queue().add("r").place
    placement = Placement("f", place, Route("d"), 1, compute_tokens=100, charged_tokens=50.0)
    assert [placement.charge_at_least(n) for n in (20, 60, 60, 75)] == [0.0, 10.0, 0.0, 15.0]
