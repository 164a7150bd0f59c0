"""The global scheduler's decisions: what is refused, and when."""

from cluster.scheduler.queue.admission import BEGUN_WAIT_S, NO_DECODE_WAIT_S
from cluster.scheduler.scheduler_events import Tick
from core.messages import Finished
from tests.cluster.scheduler.routing_world import World, ask, instance, route_of


def test_what_can_never_fit_is_refused_for_good() -> None:
    world = World(instance("d1", num_blocks=10), instance("d2", num_blocks=20))
    rejected = world.rejected(ask("a", 300, 21))
    assert rejected.retry_after_s == 0
    assert "321 tokens" in rejected.reason
    assert "320" in rejected.reason
    assert world.placed(ask("b", 300, 20)) == "d2"


def test_a_sequence_must_fit_one_group_of_an_instance() -> None:
    world = World(
        instance("d1", num_blocks=40, num_groups=2), instance("p", "p", num_blocks=60, num_groups=2)
    )
    rejected = world.rejected(ask("a", 300, 21))
    assert "321 tokens (prompt and output) do not fit: the largest instance holds 320" in rejected.reason
    assert world.placed(ask("b", 300, 20)) == "p>d1"
    world.on(instance("d2", num_blocks=60))
    assert world.placed(ask("c", 480, 1)) == "d2", "the prefill instance's groups are too small for it"


def test_without_decode_instances_requests_wait_a_little() -> None:
    world = World(instance("p", "p"))
    assert world.on(ask("a")) == []
    assert world.on(Tick()) == []
    assert world.on(Tick(), after_s=NO_DECODE_WAIT_S - 0.1) == []
    rejected = world.rejected(Tick(), after_s=0.2)
    assert rejected.reason == "no decode instance is alive"
    assert rejected.retry_after_s >= 1
    assert world.scheduler.num_queued == 0


def test_what_has_begun_waits_longer_for_a_decode_instance() -> None:
    world = World(instance("p", "p"))
    assert world.on(ask("a", attempt=1)) == []
    assert world.on(Tick()) == []
    assert world.on(Tick(), after_s=BEGUN_WAIT_S - 1.0) == []
    assert world.rejected(Tick(), after_s=2.0).reason == "no decode instance is alive"
    assert world.scheduler.num_queued == 0


def test_a_decode_instance_that_comes_in_time_serves_who_waits() -> None:
    world = World()
    world.on(ask("a"))
    world.on(Tick())
    (action,) = world.on(instance("d"), after_s=3.0)
    assert route_of(action) == "d"


def test_a_full_queue_refuses_the_last_in_order() -> None:
    world = World(instance("d", max_num_seqs=1), max_queued_requests=2)
    world.placed(ask("running", priority=1))
    world.on(ask("n1"))
    world.on(ask("n2"))
    assert world.rejected(ask("n3")).request_id == "n3"
    assert world.rejected(ask("high", priority=1)).request_id == "n2"
    assert world.rejected(ask("again", attempt=1)).request_id == "n1"
    assert world.rejected(ask("again2", attempt=2)).request_id == "high"
    assert world.on(ask("again3", attempt=3)) == []


def test_waiting_too_long_ends_in_a_429() -> None:
    world = World(instance("d", max_num_seqs=1), max_queue_wait_s=10)
    world.placed(ask("running"))
    world.on(ask("late"))
    assert world.on(Tick(), after_s=10.0) == []
    rejected = world.rejected(Tick(), after_s=0.1)
    assert "10 s" in rejected.reason
    assert rejected.retry_after_s >= 1


def test_a_wait_that_can_be_foreseen_is_refused_at_once_with_an_honest_time() -> None:
    world = World(instance("d", max_num_seqs=1), max_queue_wait_s=20)
    world.placed(ask("r0"))
    for i in range(1, 40):
        world.on(ask(f"r{i}", ttft_s=20.0))
    for i in range(10):  # one leaves per second
        world.on(Finished(f"r{i}", 0), after_s=1.0)
    assert world.scheduler.num_queued == 29
    rejected = world.rejected(ask("no", ttft_s=20.0))
    assert "about 29 s" in rejected.reason
    assert rejected.retry_after_s == 20  # 30 wait, 1 leaves per second, and 10 is half of the longest queue
    assert world.on(ask("again", attempt=1)) == []
    assert world.placed(ask("urgent", priority=9)) == "d"


def test_a_class_whose_first_token_may_take_longer_than_others_wait_waits_that_long() -> None:
    world = World(instance("d", max_num_seqs=1), max_queue_wait_s=10)
    world.placed(ask("running"))
    world.on(ask("patient", ttft_s=3600.0))
    assert world.on(Tick(), after_s=3599.0) == []
    assert "3600 s" in world.rejected(Tick(), after_s=2.0).reason


def test_a_quiet_time_says_nothing_about_capacity() -> None:
    world = World(instance("d", max_num_seqs=1), max_queue_wait_s=5)
    for i in range(5):
        world.placed(ask(f"slow{i}"))
        world.on(Finished(f"slow{i}", 0), after_s=8.0)
    world.placed(ask("running"))
    assert all(world.on(ask(f"r{i}")) == [] for i in range(20))
