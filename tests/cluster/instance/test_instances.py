"""Real prefill and decode instances in one process, with a scripted scheduler, against transformers."""

import asyncio
import contextlib
import random
from collections.abc import Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from core.messages import Leaving, Message, NeedPrefill, PlaceRequest, PrefillFailed, StartPrefill
from tests.cluster.instance.instance_world import World, world
from tests.models.continuation import continuation
from tests.models.eagle_checkpoints import make_right_eagle
from tests.models.mtp_checkpoints import make_right_mtp
from tests.patience import PATIENCE_S

VOCAB = 80


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder, model


def of_transformers(
    model: Any, batch: Sequence[tuple[int, ...]], got: Sequence[list[int]], count: int
) -> list[list[int]]:
    """What transformers says to each prompt, as far as `got` agrees with it."""
    return [
        continuation(model, prompt, said, count, ends=[1]) for prompt, said in zip(batch, got, strict=True)
    ]


def prompts(count: int, seed: int = 1, longest: int = 90) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    shared = tuple(rng.randrange(2, VOCAB) for _ in range(30))
    return [
        (shared[: rng.randrange(5, 30)] if i % 2 else ())
        + tuple(rng.randrange(2, VOCAB) for _ in range(rng.randint(1, longest)))
        for i in range(count)
    ]


@pytest.mark.parametrize("pools", [(0, 1), (1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("lookahead", [True, False])
async def test_tokens_equal_transformers(
    reference: tuple[Path, Any], pools: tuple[int, int], lookahead: bool
) -> None:
    folder, model = reference
    async with world(folder, *pools, **{"engine.lookahead": lookahead}) as w:
        batch = prompts(10)
        got = await asyncio.gather(*(w.run(p, 20) for p in batch))
        assert got == of_transformers(model, batch, got, 20)
        assert await w.run(batch[3], 20) == got[3]
        await w.idle()


async def test_preemption_changes_nothing(reference: tuple[Path, Any]) -> None:
    folder, model = reference
    async with world(folder, 1, 1, **{"engine.num_blocks": 40}) as w:
        batch = prompts(8, seed=5, longest=50)
        got = await asyncio.gather(*(w.run(p, 60) for p in batch))
        assert got == of_transformers(model, batch, got, 60)
        await w.idle()


async def test_preempted_sequences_come_back_from_host_memory(reference: tuple[Path, Any]) -> None:
    folder, model = reference
    batch, again = (
        prompts(16, seed=5, longest=50)[::2],
        list[int](),
    )  # none of these has anything in common with others
    for host_bytes in (0, 1 << 24):
        keys = {"engine.num_blocks": 40, "engine.host_cache_bytes": host_bytes}
        async with world(folder, 0, 1, **keys) as w:
            got = await asyncio.gather(*(w.run(p, 60) for p in batch))
            assert got == of_transformers(model, batch, got, 60)
            await w.idle()
            work = (await w.report(w.decodes[0])).work
            assert work.preempted > 0
            assert (work.returned > 0) == (host_bytes > 0)
            once = sum(len(p) + len(said) - 1 for p, said in zip(batch, got, strict=True))
            again.append(work.computed_tokens - once)
    without, with_host_memory = again
    assert 2 * with_host_memory < without


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.03, 0.06])
@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_a_death_at_any_time_costs_no_token(
    reference: tuple[Path, Any], delay_s: float, victim: str
) -> None:
    folder, model = reference
    async with world(folder, 2, 2) as w:
        batch = prompts(8, seed=9)
        running = [asyncio.create_task(w.run(p, 40)) for p in batch]
        await asyncio.sleep(delay_s)
        await w.kill((w.prefills if victim == "prefill" else w.decodes)[0])
        got = await asyncio.gather(*running)
        assert got == of_transformers(model, batch, got, 40)
        await w.idle()


@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_an_error_of_the_device_ends_its_instance_with_the_cause_and_costs_no_token(
    reference: tuple[Path, Any], victim: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, model = reference
    async with world(folder, 2, 2) as w:
        batch = prompts(16, seed=9)
        running = [asyncio.create_task(w.run(p, 40)) for p in batch]
        while not w.num_tokens:
            await asyncio.sleep(0)
        broken = (w.prefills if victim == "prefill" else w.decodes)[0]
        w.groups[broken.address].error = RuntimeError("CUDA error: an illegal memory access was encountered")
        got = await asyncio.gather(*running)
        assert got == of_transformers(model, batch, got, 40)
        assert "illegal memory access" in str(broken.failure)
        assert "illegal memory access" in caplog.text
        assert Leaving(broken.address) in w.messages, "schedulers would count on it still"
        await w.kill(broken)
        await w.idle()


@pytest.mark.parametrize("short", ["prefill", "decode", "both"])
async def test_a_device_without_memory_for_a_step_costs_no_token_and_no_hand_over(
    reference: tuple[Path, Any], short: str
) -> None:
    folder, model = reference
    batch = prompts(10)
    async with world(folder, *((0, 0, 2) if short == "both" else (1, 1))) as w:

        async def answers() -> list[list[int]]:
            sampled = [w.run(p, 20, temperature=0.9, seed=i) for i, p in enumerate(batch)]
            return await asyncio.gather(*(w.run(p, 20) for p in batch), *sampled)

        for instance in w.prefills if short == "prefill" else w.decodes:
            w.sinks[instance.address].run_out(range(2, 100_000, 7))
        got = await answers()
        for scarce in w.sinks.values():
            scarce.run_out(())
        assert got == await answers()
        assert got[:10] == of_transformers(model, batch, got[:10], 20)
        assert max(report.work.out_of_memory_steps for report in await w.reports()) > 3
        assert not any(isinstance(message, NeedPrefill) for message in w.messages)
        assert not any(instance.failure for instance in w.prefills + w.decodes)
        await w.idle()


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.03])
async def test_what_ends_with_its_prompt_is_answered_by_prefill_and_survives_its_death(
    reference: tuple[Path, Any], delay_s: float
) -> None:
    folder, model = reference
    async with world(folder, 2, 1) as w:
        batch = prompts(12, seed=13)
        running = [asyncio.create_task(w.run(p, 1)) for p in batch]
        left = asyncio.create_task(w.run(batch[0], 1))
        await asyncio.sleep(delay_s)
        left.cancel()
        await w.kill(w.prefills[0])
        got = await asyncio.gather(*running)
        assert got == of_transformers(model, batch, got, 1)
        await w.idle()
        reports = await w.reports()
        worked = {report.address for report in reports if report.work.computed_tokens}
        assert w.prefills[0].address in worked
        assert w.decodes[0].address not in worked
        assert not any(report.work.grants for report in reports)


async def test_without_another_prefill_decode_computes_the_prompt(reference: tuple[Path, Any]) -> None:
    folder, model = reference
    async with world(folder, 1, 1) as w:
        batch = prompts(6, seed=11)
        running = [asyncio.create_task(w.run(p, 20)) for p in batch]
        await asyncio.sleep(0.005)
        await w.kill(w.prefills[0])
        got = await asyncio.gather(*running)
        assert got == of_transformers(model, batch, got, 20)
        await w.idle()


async def test_clients_that_leave_at_any_time_leave_nothing_behind(reference: tuple[Path, Any]) -> None:
    folder, _ = reference
    rng = random.Random(3)
    async with world(folder, 2, 2) as w:

        async def leave(prompt: tuple[int, ...]) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rng.random() * 0.15):
                    await w.run(prompt, 100)

        await asyncio.gather(*(leave(p) for p in prompts(30, seed=4)))
        await w.idle()
        assert w.frontend.num_running == 0


async def test_seeded_sampling_does_not_depend_on_company(reference: tuple[Path, Any]) -> None:
    folder, _ = reference
    sampling = {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 40,
        "seed": 5,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
    }
    async with world(folder, 1, 1) as w:
        batch = prompts(8, seed=21)
        alone = [await w.run(p, 24, **sampling) for p in batch[:2]]
        together = await asyncio.gather(*(w.run(p, 24, **sampling) for p in batch))
        assert together[:2] == alone


async def test_a_prompt_does_not_wander_from_one_full_instance_to_the_next(
    reference: tuple[Path, Any],
) -> None:
    folder, model = reference
    prompt = prompts(1, seed=6)[0]
    asked: list[str] = []
    async with world(folder, 0, 1) as w:
        full = [w.network.join("prefill") for _ in range(2)]
        for mail in full:

            def refuse(sender: str, message: Message, mail: Any = mail) -> None:
                if isinstance(message, StartPrefill):
                    asked.append(mail.address)
                    mail.send(sender, PrefillFailed(message.grant.id, "no room"))

            mail.listen(refuse, lambda _: None)
        w.prefills += [SimpleNamespace(address=mail.address) for mail in full]  # type: ignore[list-item]
        got = [await w.run(prompt, 8)]
        assert got == of_transformers(model, [prompt], got, 8)
        w.prefills.clear()
        await w.idle()
    assert len(asked) == 3


async def test_instances_of_both_roles_do_not_wait_for_each_others_blocks(
    reference: tuple[Path, Any],
) -> None:
    """Each has reserved all its blocks to prompts that the other is to compute, and so has no room for the other's prompts."""
    folder, model = reference
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(2, VOCAB) for _ in range(22)) for _ in range(8)]
    overrides = {"engine.num_blocks": 14, "engine.max_batch_tokens": 16}
    async with world(folder, 0, 0, num_both=2, **overrides) as it, asyncio.timeout(PATIENCE_S):
        outs = await asyncio.gather(*(it.run(prompt, 6) for prompt in prompts))
        await it.idle()
    assert outs == of_transformers(model, prompts, outs, 6)


def repeating(count: int) -> list[tuple[int, ...]]:
    """Prompts after which a small model soon repeats itself."""
    rng = random.Random(8)
    return [tuple(rng.randrange(2, VOCAB) for _ in range(5)) * 3 for _ in range(count)]


@pytest.mark.parametrize("source", ["ngram", "draft", "mtp", "eagle"])
async def test_draft_tokens_cost_no_token_when_an_instance_dies_or_leaves(
    reference: tuple[Path, Any], source: str, tmp_path: Path
) -> None:
    """One is killed in the middle of it, and then one of those that are left lets its sequences move."""
    folder, _ = reference
    if source in ("mtp", "eagle"):
        folder = tmp_path
    if source == "mtp":
        make_right_mtp(folder, VOCAB)
    if source == "eagle":
        make_right_eagle(folder / "head", folder, VOCAB)
    batch = repeating(6)
    temperatures = (0.0, 0.3, 0.7, 1.0, 0.0, 0.3)

    def asked(w: World) -> list[Coroutine[Any, Any, list[int]]]:
        return [
            w.run(prompt, 80, temperature=temperature, seed=seed, num_logprobs=0)
            for seed, (prompt, temperature) in enumerate(zip(batch, temperatures, strict=True))
        ]

    async with world(folder, 0, 1) as w:
        want = [await answer for answer in asked(w)]
    if source == "draft":
        source = f"draft:{folder}"  # the model itself, which is right as often as a model can be
    if source == "eagle":
        source = f"eagle:{folder}/head"
    keys = {"engine.speculate": source, "engine.host_cache_bytes": 1 << 20}
    async with world(folder, 1, 3, **keys) as w:
        for victim in ("killed", "drained"):
            before = w.num_tokens
            running = [asyncio.create_task(answer) for answer in asked(w)]
            async with asyncio.timeout(PATIENCE_S):
                while w.num_tokens < before + 60:
                    await asyncio.sleep(0)
            if victim == "killed":
                await w.kill(w.decodes[0])
            else:
                leaving = w.decodes.pop(0)
                await leaving.drain(20)
                assert any(isinstance(m, PlaceRequest) and m.source == leaving.address for m in w.messages)
                await leaving.close()
            assert await asyncio.gather(*running) == want
        await w.idle()
        assert max(report.work.accepted_tokens for report in await w.reports()) > 0


SLOTS = {"engine.max_num_seqs": 2}
"""More begin than that: their prompts are computed before a slot is free for them on decode."""


class Counted:
    """Requests of which it is known how many have had their first token and not their last."""

    def __init__(self, w: World) -> None:
        self._world, self.num_begun, self.most_begun = w, 0, 0

    async def run(self, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
        tokens: list[int] = []
        async for token in self._world.frontend.generate(self._world.request(prompt, max_tokens)):
            if not tokens:
                self.num_begun += 1
                self.most_begun = max(self.most_begun, self.num_begun)
            tokens.append(token.token)
        self.num_begun -= 1
        return tokens


@pytest.mark.parametrize("num_blocks", [200, 60], ids=["room for all", "preempts"])
async def test_more_begin_than_there_are_slots_and_every_token_is_right(
    reference: tuple[Path, Any], num_blocks: int
) -> None:
    folder, model = reference
    async with world(folder, 1, 1, **SLOTS, **{"engine.num_blocks": num_blocks}) as w:
        batch, counted = prompts(7, seed=3, longest=40), Counted(w)
        got = await asyncio.gather(*(counted.run(p, 60) for p in batch))
        assert got == of_transformers(model, batch, got, 60)
        assert num_blocks < 200 or counted.most_begun > 3
        await w.idle()


async def test_clients_that_leave_while_they_wait_for_a_slot_leave_nothing_behind(
    reference: tuple[Path, Any],
) -> None:
    folder, model = reference
    async with world(folder, 1, 1, **SLOTS) as w:
        batch, counted = prompts(8, seed=4), Counted(w)
        running = [asyncio.create_task(counted.run(p, 40)) for p in batch]
        while counted.num_begun < 5:
            await asyncio.sleep(0)
        for task in running[1::2]:
            task.cancel()
        got = await asyncio.gather(*running[::2])
        assert got == of_transformers(model, batch[::2], got, 40)
        await w.idle()


@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_a_death_while_sequences_wait_for_a_slot_costs_no_token(
    reference: tuple[Path, Any], victim: str
) -> None:
    folder, model = reference
    async with world(folder, 2, 2, **SLOTS) as w:
        batch, counted = prompts(10, seed=6), Counted(w)
        running = [asyncio.create_task(counted.run(p, 40)) for p in batch]
        while counted.num_begun < 5:
            await asyncio.sleep(0)
        await w.kill((w.prefills if victim == "prefill" else w.decodes)[0])
        got = await asyncio.gather(*running)
        assert got == of_transformers(model, batch, got, 40)
        await w.idle()
