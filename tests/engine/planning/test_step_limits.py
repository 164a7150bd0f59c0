"""What becomes of plans for which the ranks find no memory: the next one is smaller, and later ones grow again."""

from core.config.cluster_config import EngineConfig
from core.plan import Sampled, StepPlan, StepResult
from core.types import Request, SamplingParams, Slo
from engine.planning.dp_scheduler import make_planner
from engine.planning.step_scheduler import StepScheduler
from tests.engine.fifo_policy import FifoPolicy


def scheduler(**config: int) -> StepScheduler:
    settings = EngineConfig(**{"block_size": 4, "max_batch_tokens": 64, "max_num_seqs": 16, **config})
    return StepScheduler(settings, 4000, 10_000, FifoPolicy())


def request(name: str, num_tokens: int, max_tokens: int = 1000, priority: int = 0) -> Request:
    return Request(
        id=name,
        prompt=tuple(range(2, 2 + num_tokens)),
        sampling=SamplingParams(max_tokens=max_tokens),
        reply_to="f",
        slo=Slo(name=f"class {priority}", priority=priority),
    )


def planned(planner: StepScheduler) -> StepPlan:
    plan = planner.plan(0.0)
    assert plan is not None
    return plan


def compute(planner: StepScheduler, plan: StepPlan) -> None:
    sampled = tuple(Sampled(work.key, 5) for work in plan.work if work.samples)
    planner.commit(plan, StepResult(step=plan.step, sampled=sampled), 0.0)
    planner.check_integrity()


def test_a_prompts_chunk_is_halved_until_there_is_memory_and_grows_again() -> None:
    planner = scheduler(prefix_cache=False)
    planner.sequences.add(request("a", 200, max_tokens=1))
    sizes: list[int] = []
    for _ in range(2):
        sizes.append(planned(planner).num_tokens)
        assert planner.take_back().goes_on
    assert sizes == [64, 32]
    sizes.clear()
    while len(sizes) < 512 and 64 not in sizes:
        plan = planned(planner)
        sizes.append(plan.num_tokens)
        compute(planner, plan)
        planner.sequences.add(request(f"r{len(sizes)}", 64, max_tokens=1))
    assert sizes[0] == 16
    assert max(sizes[:50]) < 24
    assert sizes[-1] == 64


def test_a_sequence_of_the_lowest_class_gives_way_where_no_prompt_can() -> None:
    planner = scheduler()
    for name, priority in (("a", 1), ("b", 0), ("c", 1)):
        planner.sequences.add(request(name, 3, priority=priority))
    compute(planner, planned(planner))
    assert len(planned(planner).work) == 3
    assert planner.take_back().goes_on
    again = planned(planner)
    assert [work.key for work in again.work] == ["a#0", "c#0"]
    assert planner.load().num_preempted == 1
    compute(planner, again)
    for _ in range(40):
        plan = planned(planner)
        compute(planner, plan)
        if len(plan.work) == 3:
            break
    assert sorted(work.key for work in plan.work) == ["a#0", "b#0", "c#0"]


def test_the_smallest_step_is_tried_once_more_and_no_oftener() -> None:
    planner = scheduler()
    planner.sequences.add(request("a", 12))
    assert planned(planner).num_tokens == 12
    assert planner.take_back().goes_on
    compute(planner, planned(planner))
    for goes_on in (True, False):
        assert planned(planner).num_tokens == 1
        assert planner.take_back().goes_on is goes_on


def test_what_was_planned_ahead_is_taken_back_too_and_planned_under_the_same_numbers() -> None:
    planner = scheduler()
    planner.sequences.add(request("a", 3))
    planner.sequences.add(request("b", 9))
    compute(planner, planned(planner))
    first, second = planned(planner), planned(planner)
    planner.take_back()
    planner.check_integrity()
    again = planned(planner)
    assert (again.step, planned(planner).step) == (first.step, second.step)
    assert again.drop == ("a#0", "b#0"), "the ranks forget what they may have noted"
    assert [(new.key, new.tokens[-1]) for new in again.new] == [("a#0", 5)], "and are told all that is known"


def test_draft_tokens_are_given_up_first() -> None:
    settings = EngineConfig(block_size=4, speculate="ngram", speculate_tokens=4)
    planner = make_planner(settings, 400, 10_000, FifoPolicy(), 1)
    asked = Request(id="a", prompt=(5, 6) * 8, sampling=SamplingParams(max_tokens=100), reply_to="f")
    planner.sequences.add(asked)
    drafting = None
    for _ in range(20):
        plan = planner.plan(0.0)
        assert plan is not None
        if any(work.drafts for work in plan.work):
            drafting = plan
            break
        (work,) = plan.work
        token = (5, 6)[work.known_end % 2]
        planner.commit(plan, StepResult(step=plan.step, sampled=(Sampled(work.key, token),)), 0.0)
    assert drafting is not None
    assert planner.take_back().goes_on
    plan = planner.plan(0.0)
    assert plan is not None
    assert [(work.key, work.drafts) for work in plan.work] == [("a#0", ())]
