"""Recurrent states beside keys and values, through hand-overs, preemptions, deaths and moves."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from core.messages import Buddy, NeedPrefill, PlaceRequest, PrefillFailed
from models.families.table import read_spec
from tests.cluster.instance.instance_world import world
from tests.knowing import know_answers
from tests.models.checkpoints import COMPRESSED, HYBRID
from tests.models.continuation import continuation
from tests.models.served import make_served_as, some_prompts
from tests.patience import PATIENCE_S

LENGTH = 64
BLOCKS = {"engine.num_blocks": 2400}

Served = tuple[Path, list[tuple[int, ...]], Any]
"""A folder, prompts, and the reference."""


pytestmark = pytest.mark.turns(3)


@pytest.fixture(scope="module", params=[*HYBRID, pytest.param("deepseek_v4", marks=pytest.mark.slow)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("hybrid")
    config: Any = (HYBRID | COMPRESSED)[request.param](random.Random(3), 0)
    config.max_position_embeddings = 256
    reference = make_served_as(folder, config)
    batch = [tuple(prompt) for prompt in some_prompts(0, 5, 20)]
    return folder, batch, reference


def of_transformers(served: Served, got: Sequence[list[int]], count: int = LENGTH) -> list[list[int]]:
    """What transformers says to each prompt, as far as `got` agrees with it. `World.request` names the end."""
    _, batch, reference = served
    return [
        continuation(reference, prompt, said, count, ends=[1])
        for prompt, said in zip(batch, got, strict=False)
    ]


@pytest.mark.turns(1)
async def test_handed_over_tokens_equal_transformers(served: Served) -> None:
    folder, batch, _ = served
    async with world(folder, 1, 2, **BLOCKS) as w:
        for _ in range(2):
            got = await asyncio.gather(*(w.run(prompt, LENGTH) for prompt in batch))
            assert got == of_transformers(served, got)
        assert not any(isinstance(m, NeedPrefill | PrefillFailed) for m in w.messages), "a hand-over failed"
        await w.idle()
        hits = [report.work.prefix_hit_tokens for report in await w.reports()]
        assert max(hits) > 0, "no prompt went on from a checkpoint"


async def test_preemption_changes_nothing(served: Served) -> None:
    folder, batch, _ = served
    states = read_spec(folder).kv_layout(4, "float32").state_blocks
    async with world(folder, 1, 1, **{"engine.num_blocks": 2 * states + 50}) as w:
        got = await asyncio.gather(*(w.run(prompt, LENGTH) for prompt in batch))
        assert got == of_transformers(served, got)
        await w.idle()
        assert max(report.work.preempted for report in await w.reports()) > 0


async def test_preempted_sequences_come_back_with_their_states(served: Served) -> None:
    folder, _, reference = served
    states, batch = read_spec(folder).kv_layout(4, "float32").state_blocks, long_prompts(4)
    keys = {"engine.num_blocks": 4 * states + 90, "engine.host_cache_bytes": 1 << 28}
    async with world(folder, 0, 1, **keys) as w:
        got = await asyncio.gather(*(w.run(prompt, LONG) for prompt in batch))
        assert got == of_transformers((folder, batch, reference), got, LONG)
        await w.idle()
        work = (await w.report(w.decodes[0])).work
        assert work.preempted >= work.returned > 0


async def test_a_step_without_memory_costs_no_token(served: Served) -> None:
    folder, batch, _ = served
    async with world(folder, 1, 1, **BLOCKS) as w:
        w.sinks[w.prefills[0].address].run_out((3, 30))
        w.sinks[w.decodes[0].address].run_out((7, 50))
        got = await asyncio.gather(*(w.run(prompt, LENGTH) for prompt in batch))
        assert got == of_transformers(served, got)
        reports = await w.reports()
        assert {report.work.out_of_memory_steps for report in reports[-2:]} == {2}
        await w.idle()


@pytest.mark.parametrize("what", ["prefill killed", "decode killed", "decode drained"])
async def test_an_instance_that_dies_or_leaves_costs_no_token(served: Served, what: str) -> None:
    folder, batch, _ = served
    async with world(folder, 2, 2, **BLOCKS) as w:
        running = [asyncio.create_task(w.run(prompt, LENGTH)) for prompt in batch]
        if what == "prefill killed":
            await asyncio.sleep(0.01)
            await w.kill(w.prefills[0])
        else:
            async with asyncio.timeout(PATIENCE_S):
                while w.num_tokens < 40:
                    await asyncio.sleep(0.001)
            if what == "decode killed":
                await w.kill(w.decodes[0])
            else:
                leaving = w.decodes.pop(0)
                await leaving.drain(20)
                await leaving.close()
        got = await asyncio.gather(*running)
        assert got == of_transformers(served, got)
        await w.idle()


async def test_draft_tokens_cost_no_token_when_a_decode_instance_dies(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, batch, _ = served
    answers = know_answers(monkeypatch)
    async with world(folder, 1, 2, **BLOCKS, **{"engine.speculate": "ngram"}) as w:
        got = await asyncio.gather(*(w.run(prompt, LENGTH) for prompt in batch))
        assert got == of_transformers(served, got)
        answers.update(zip(batch, got, strict=True))
        before = w.num_tokens
        running = [asyncio.create_task(w.run(prompt, LENGTH)) for prompt in batch]
        async with asyncio.timeout(PATIENCE_S):
            while w.num_tokens < before + 40:
                await asyncio.sleep(0.001)
        await w.kill(w.decodes[0])
        assert await asyncio.gather(*running) == got
        await w.idle()
        assert max(report.work.accepted_tokens for report in await w.reports()) > 0


LONG = 120
"""More than what lies between two checkpoints of a sequence that generates."""


def long_prompts(count: int) -> list[tuple[int, ...]]:
    return [tuple(prompt) for prompt in some_prompts(9, count, 90)]


@pytest.mark.parametrize("tier", ["host", "disk"])
async def test_prefixes_come_back_from_below_with_their_states(
    served: Served, tier: str, tmp_path: Path
) -> None:
    folder, _, reference = served
    states = read_spec(folder).kv_layout(4, "float32").state_blocks
    keys: dict[str, Any] = {"engine.num_blocks": 3 * states + 60, f"engine.{tier}_cache_bytes": 1 << 28}
    if tier == "disk":
        keys["engine.disk_cache_path"] = str(tmp_path)
    prompts = long_prompts(4)
    async with world(folder, 0, 1, **keys) as w:
        first = [await w.run(prompt, 12) for prompt in prompts]
        before = await w.report(w.decodes[0])
        again = [await w.run(prompt, 12) for prompt in prompts]
        for prompt, said in zip(prompts, first, strict=True):
            assert said == continuation(reference, prompt, said, 12, ends=[1])
        assert again == first
        await w.idle()
        after = await w.report(w.decodes[0])
        restored = after.tiers.host_hits + after.tiers.disk_hits
        assert restored >= len(prompts) * states, "no state was restored"
        assert after.work.computed_tokens - before.work.computed_tokens < sum(map(len, prompts)) / 2


async def test_a_buddy_goes_on_from_the_states_that_it_has_copies_of(served: Served) -> None:
    folder, batch, _ = served
    keys = BLOCKS | {"engine.host_cache_bytes": 1 << 28, "transfer.kv_replicas": 1}
    async with world(folder, 1, 2, **keys) as w:
        lost, buddy = w.decodes
        w.scheduler.send(lost.address, Buddy(buddy.address))
        w.decodes.remove(buddy)
        running = [asyncio.create_task(w.run(prompt, LONG)) for prompt in batch[:2]]
        async with asyncio.timeout(PATIENCE_S):
            while w.num_tokens < 2 * LONG - 50 and not all(task.done() for task in running):
                await asyncio.sleep(0.001)
        w.decodes.append(buddy)
        await w.kill(lost)
        got = await asyncio.gather(*running)
        assert got == of_transformers(served, got, LONG)
        await w.idle()
        states = read_spec(folder).kv_layout(4, "float32").state_blocks
        assert (await w.report(buddy)).tiers.host_hits >= states, "no state was fetched"


async def test_sequences_leave_a_draining_instance_with_their_states(served: Served) -> None:
    folder, batch, _ = served
    async with world(folder, 0, 2, **BLOCKS) as w:
        leaving, staying = w.decodes
        w.decodes.remove(staying)
        running = [asyncio.create_task(w.run(prompt, LONG)) for prompt in batch[:2]]
        async with asyncio.timeout(PATIENCE_S):
            while w.num_tokens < 150:
                await asyncio.sleep(0.001)
        w.decodes = [staying]
        await leaving.drain(20)
        assert any(isinstance(m, PlaceRequest) and m.source == leaving.address for m in w.messages), (
            "none has moved"
        )
        got = await asyncio.gather(*running)
        hits = (await w.report(staying)).work.prefix_hit_tokens
        assert got == of_transformers(served, got, LONG)
        assert hits > 100, "their tokens were computed again"
        await leaving.close()
        await w.idle()
