"""What a rank computes before it serves changes nothing of what it says afterwards."""

import logging
import random
from pathlib import Path
from typing import Any

import pytest

from core.errors import ConfigError, OutOfMemory
from core.kv import KVShard
from core.plan import Sampled, StepPlan, StepResult
from core.types import Request, SamplingParams
from device.simulated import SimulatedDevice
from engine.execution.batch.step_memory import StepMemory
from engine.execution.graphs.warm_up import meeting, warm_up
from engine.execution.runner import Runner
from models.registry import load_model
from tests.engine.execution.test_runner import Instance, prompts, resident_pool
from tests.models.checkpoints import CPU, FAMILIES, HYBRID, make

NUM_BLOCKS, MAX_CONTEXT = 200, 128


@pytest.mark.turns(3)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize("kind", [{}, {"simulated": True}], ids=["host", "device"])
def test_first_steps_change_no_token(family: str, kind: dict[str, Any], tmp_path: Path) -> None:
    rng = random.Random(family)
    make(tmp_path, (FAMILIES | HYBRID)[family](rng, 0), seed=1)
    model = load_model(tmp_path, "float32", CPU)
    sampling = SamplingParams(temperature=0.9, seed=4, max_tokens=12)
    asked = [
        Request(id=str(number), prompt=text, sampling=sampling, reply_to="f")
        for number, text in enumerate(prompts(rng))
    ]
    plain, warm = (Instance(model, NUM_BLOCKS, **kind) for _ in range(2))
    sizes: list[list[int]] = []

    def step(plan: StepPlan) -> StepResult:
        sizes.append([work.count for work in plan.work])
        result = warm.runner.step(plan)
        assert [each.key for each in result.sampled] == [work.key for work in plan.work]
        return result

    warm_up(
        step,
        max_tokens=100,
        max_seqs=5,
        max_context_tokens=MAX_CONTEXT,
        num_blocks=NUM_BLOCKS,
        block_size=4,
        num_state_blocks=warm.num_states,
    )
    assert sizes == [[100], [64, 1], [16, 16, 16, 16, 1], [16, 1, 1, 1, 1]]
    assert warm.run(asked) == plain.run(asked)


def test_first_steps_wait_for_what_is_copied_from_a_device_on_a_stream_of_its_own(tmp_path: Path) -> None:
    make(tmp_path, FAMILIES["llama"](random.Random(1), 0), seed=1)
    model, device = load_model(tmp_path, "float32", CPU), SimulatedDevice(seed=1)
    pool = resident_pool(KVShard.whole(model.spec.kv_layout(4, "float32")), NUM_BLOCKS, device)
    steps = StepMemory(device, CPU, 100)
    runner, said = Runner(model, pool, 4, steps=steps), list[Sampled]()

    def step(plan: StepPlan) -> StepResult:
        result = runner.step(plan)
        said.extend(result.sampled)
        return result

    warm_up(
        step,
        max_tokens=100,
        max_seqs=3,
        max_context_tokens=MAX_CONTEXT,
        num_blocks=NUM_BLOCKS,
        block_size=4,
    )
    assert len(said) == 1 + 2 + 3 + 3
    assert not device.violations
    runner.close()
    device.close()


def sampled(plan: StepPlan) -> StepResult:
    return StepResult(step=plan.step, sampled=tuple(Sampled(work.key, 1) for work in plan.work))


@pytest.mark.parametrize(
    ("max_tokens", "max_context", "num_blocks"), [(8192, 32768, 9), (8192, 40, 5000), (1, 4096, 300)]
)
def test_they_fit_into_the_smallest_pool_and_context(
    max_tokens: int, max_context: int, num_blocks: int
) -> None:
    plans: list[StepPlan] = []

    def step(plan: StepPlan) -> StepResult:
        plans.append(plan)
        return sampled(plan)

    warm_up(
        step,
        max_tokens=max_tokens,
        max_seqs=256,
        max_context_tokens=max_context,
        num_blocks=num_blocks,
        block_size=16,
        num_state_blocks=2,
    )
    works = [work for plan in plans for work in plan.work]
    assert all(plan.step < 0 for plan in plans)
    assert max(work.start + work.count for work in works) < max_context
    assert max(block for work in works for block in work.block_ids) < num_blocks
    assert all(len(work.block_ids) >= 2 + (work.start + work.count) / 16 for work in works)
    assert max(plan.num_tokens for plan in plans) <= max_tokens
    assert max(len(plan.work) for plan in plans) <= 256
    assert max_tokens < 2 or max(plan.size.num_prompt for plan in plans) > 0.75 * max_tokens


def test_what_finds_no_memory_is_left_out_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    known: set[str] = set()
    sizes: list[int] = []

    def step(plan: StepPlan) -> StepResult:
        known.difference_update(plan.drop)
        known.update(seq.key for seq in plan.new)
        assert {work.key for work in plan.work} <= known
        if plan.work[0].count > 1000:
            raise OutOfMemory("no memory for that")
        assert all(not work.start or work.start <= 1000 for work in plan.work)
        sizes.append(plan.work[0].count)
        return sampled(plan)

    with caplog.at_level(logging.INFO):
        warm_up(step, max_tokens=8192, max_seqs=64, max_context_tokens=9000, num_blocks=9000, block_size=16)
    assert sizes == [256, 64, 16, 16]
    assert len(known) <= 64
    said = [message.split(":")[0] for message in caplog.messages[1:-1]]
    assert said == [
        f"first step {number} of 7, {prompts} tokens"
        for number, prompts in enumerate(
            [
                "a prompt of 8192",
                "a prompt of 4096",
                "a prompt of 1024",
                "a prompt of 256",
                "a prompt of 64",
                "63 prompts of 16",
                "a prompt of 16",
            ],
            1,
        )
    ]


def test_the_start_of_ranks_that_meet_ends_where_one_finds_no_memory() -> None:
    """It would go on to steps in which nobody meets it."""
    tried: list[int] = []

    def step(plan: StepPlan) -> StepResult:
        tried.append(plan.num_tokens)
        if plan.num_tokens < 8192:
            raise OutOfMemory("no memory for that")
        return sampled(plan)

    with pytest.raises(
        ConfigError, match=r"first step of 4097 tokens \(no memory for that\): lower engine\.max_batch_tokens"
    ):
        warm_up(
            meeting(step),
            max_tokens=8192,
            max_seqs=64,
            max_context_tokens=9000,
            num_blocks=9000,
            block_size=16,
        )
    assert tried == [8192, 4097]
