"""A request that is sent again with its Idempotency-Key has one answer."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.ingress.streams.test_resumed_streams import TWO_TENANTS, tokens_of
from tests.cluster.ingress.streams.two_ingresses import CHAT, LENGTH, make_model, two_ingresses
from tests.patience import until

BODY = {**CHAT, "stream": False}
LONG = {**BODY, "max_tokens": 300}
ONE_AT_A_TIME: dict[str, Any] = {"engine.max_num_seqs": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


async def test_the_same_request_again_has_the_same_answer_at_any_ingress(folder: Path) -> None:
    async with two_ingresses(folder) as world:
        first, second = world.ingresses
        answer = await first.post(BODY, idempotency_key="a")
        num_computed = world.num_computed
        for ingress in (first, second):
            again = await ingress.post(BODY, idempotency_key="a")
            assert again.status_code == 200
            assert again.json() == answer.json()
        assert world.num_computed == num_computed
        other = await second.post(BODY, idempotency_key="b")
        assert other.json()["id"] != answer.json()["id"]
        assert world.num_computed > num_computed


@pytest.mark.parametrize("same", [True, False])
async def test_requests_that_come_while_the_first_one_runs_wait_for_its_answer(
    folder: Path, same: bool
) -> None:
    async with two_ingresses(folder) as world:
        first, second = world.ingresses
        running = asyncio.create_task(first.post(LONG, idempotency_key="a"))
        if not same:
            await until(lambda: world.num_running > 0)
        others = [(first if same else second).post(LONG, idempotency_key="a") for _ in range(3)]
        answers = [one.json() for one in await asyncio.gather(running, *others)]
        said = [answer["choices"][0]["token_ids"] for answer in answers]
        assert len(said[0]) == 300
        assert all(one == said[0] for one in said)
        num_prompt = answers[0]["usage"]["prompt_tokens"]
        assert world.num_computed == num_prompt + 299, "it was computed once"


@pytest.mark.parametrize("lost", ["none", "client", "ingress"])
async def test_requests_that_come_while_the_first_one_waits_for_a_place_have_its_answer(
    folder: Path, lost: str
) -> None:
    async with two_ingresses(folder, **ONE_AT_A_TIME) as world:
        first, second = world.ingresses
        before = asyncio.create_task(first.post(LONG))
        await until(lambda: world.num_running > 0)
        asked = [first.post(BODY, idempotency_key="a"), second.post(BODY, idempotency_key="a")]
        waiting = [asyncio.create_task(one) for one in asked]
        await until(lambda: first.frontend.num_running + second.frontend.num_running == 3)
        another = await second.post({**BODY, "max_tokens": 3}, idempotency_key="a")
        assert (another.status_code, another.json()["error"]["code"]) == (422, "idempotency_mismatch")
        if lost == "client":
            waiting.pop(0).cancel()
        elif lost == "ingress":
            before.cancel()
            await first.kill()
            waiting.pop(0).cancel()
        answers = await asyncio.gather(*waiting)
        assert [one.status_code for one in answers] == [200] * len(answers)
        assert all(one.json() == answers[0].json() for one in answers)
        if lost != "ingress":
            usages = [answers[0].json()["usage"], (await before).json()["usage"]]
            computed = sum(one["prompt_tokens"] + one["completion_tokens"] - 1 for one in usages)
            cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in usages)
            assert world.num_computed == computed - cached, "it was computed once"
        await world.is_idle()


async def test_another_body_under_the_key_of_a_request_that_waits_elsewhere_is_refused(folder: Path) -> None:
    async with two_ingresses(folder, **ONE_AT_A_TIME) as world:
        first, second = world.ingresses
        before = asyncio.create_task(first.post(LONG))
        await until(lambda: world.num_running > 0)
        one = asyncio.create_task(first.post(BODY, idempotency_key="a"))
        await until(lambda: first.frontend.num_running == 2)
        another = await second.post({**BODY, "max_tokens": 3}, idempotency_key="a")
        assert (another.status_code, another.json()["error"]["code"]) == (422, "idempotency_mismatch")
        assert (await one).status_code == (await before).status_code == 200
        await world.is_idle()


async def test_an_answer_whose_ingress_is_killed_is_had_from_another_one(folder: Path) -> None:
    async with two_ingresses(folder) as world:
        first, second = world.ingresses
        lost = asyncio.create_task(first.post(LONG, idempotency_key="a"))
        await until(lambda: world.num_running > 0)
        await first.kill()
        answer = await second.post(LONG, idempotency_key="a")
        assert len(answer.json()["choices"][0]["token_ids"]) == 300
        assert world.num_computed == answer.json()["usage"]["prompt_tokens"] + 299
        lost.cancel()


async def test_a_client_that_hangs_up_and_asks_again_has_the_rest(folder: Path) -> None:
    async with two_ingresses(folder) as world:
        first, second = world.ingresses
        hung_up = asyncio.create_task(first.post(LONG, idempotency_key="a"))
        await until(lambda: world.num_computed > 50)
        hung_up.cancel()
        await world.is_idle()
        num_computed = world.num_computed
        assert num_computed < 300
        answer = await second.post(LONG, idempotency_key="a")
        assert len(answer.json()["choices"][0]["token_ids"]) == 300
        assert world.num_computed < 350, "the prefix cache has what was computed"


async def test_a_stream_with_a_key_begins_again_with_the_same_events(folder: Path) -> None:
    async with two_ingresses(folder) as world:
        first, second = world.ingresses
        body = {**BODY, "stream": True}
        begun = await first.events(body, count=7, idempotency_key="a")
        again = await second.events(body, idempotency_key="a")
        assert again[:7] == begun
        assert len(tokens_of(again)) == LENGTH


async def test_a_key_with_another_body_is_refused_and_other_owners_have_keys_of_their_own(
    folder: Path,
) -> None:
    async with two_ingresses(folder, rules=TWO_TENANTS) as world:
        first, second = world.ingresses
        mine = {"authorization": "Bearer k1", "idempotency_key": "a"}
        answer = await first.post(BODY, **mine)
        refused = await second.post({**BODY, "max_tokens": 3}, **mine)
        assert refused.status_code == 422
        assert "Idempotency-Key belongs to another request" in refused.json()["error"]["message"]
        theirs = await second.post(BODY, **mine | {"authorization": "Bearer k2"})
        assert theirs.status_code == 200
        assert theirs.json()["id"] != answer.json()["id"]
        wrong = await second.post(BODY, **mine | {"idempotency_key": "x" * 256})
        assert wrong.status_code == 400
