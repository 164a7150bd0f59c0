"""A client that lost its ingress, or its connection, and has the rest of its answer from another one."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from cluster.ingress.tenants.access import Rules, TenantRules
from tests.cluster.ingress.api.fakes import NAME
from tests.cluster.ingress.api.harness import CLASSES
from tests.cluster.ingress.streams.two_ingresses import (
    CHAT,
    LENGTH,
    Ingress,
    data_of,
    last_id,
    make_model,
    two_ingresses,
)
from tests.patience import PATIENCE_S, until

PROMPT = {key: value for key, value in CHAT.items() if key != "messages"} | {"prompt": "Tell me."}
DOORS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": PROMPT,
    "/v1/messages": {
        "model": NAME, "messages": CHAT["messages"], "max_tokens": LENGTH, "temperature": 0.0, "stream": True
    },
    "/v1/responses": {
        "model": NAME, "input": "Tell me.", "max_output_tokens": LENGTH, "stream": True, "ignore_eos": True,
    },
}  # fmt: skip
TWO_TENANTS = Rules(
    CLASSES,
    {"": TenantRules(), "one": TenantRules((SecretStr("k1"),)), "other": TenantRules((SecretStr("k2"),))},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def tokens_of(events: list[str], choice: int = 0) -> list[int]:
    chunks = [one["choices"][0] for one in data_of(events) if one != "[DONE]" and one["choices"]]
    return [token for one in chunks if one["index"] == choice for token in one.get("token_ids", ())]


@pytest.mark.parametrize("path", DOORS)
@pytest.mark.parametrize("kills", [True, False])
async def test_the_rest_of_a_stream_comes_from_another_ingress(folder: Path, path: str, kills: bool) -> None:
    body = DOORS[path]
    async with two_ingresses(folder) as world:
        first, second = world.ingresses
        begun = await first.events(body, path=path, count=20)
        if kills:
            await first.kill()
        rest = await second.events(body, path=path, last_event_id=last_id(begun))
        again = await second.events(body, path=path, last_event_id=last_id(begun[:1]))
        assert rest
        assert begun[1:] + rest == again
        await world.is_idle()


async def test_nothing_is_computed_twice_and_the_answer_is_that_of_an_undisturbed_run(folder: Path) -> None:
    body = {**CHAT, "seed": 5}
    async with two_ingresses(folder) as world:
        whole = await world.ingresses[0].events(body)
        num_whole = world.num_computed
    async with two_ingresses(folder) as world:
        first, second = world.ingresses
        begun = await first.events(body, count=9)
        await first.kill()
        rest = await second.events(body, last_event_id=last_id(begun))
        assert tokens_of(begun + rest) == tokens_of(whole)
        assert world.num_computed == num_whole


async def test_an_answer_of_several_choices_goes_on_where_each_of_them_stood(folder: Path) -> None:
    body = {**CHAT, "n": 3, "seed": 2, "stream_options": {"include_usage": True}}
    async with two_ingresses(folder) as world:
        first, second = world.ingresses
        begun = await first.events(body, count=50)
        await first.kill()
        rest = await second.events(body, last_event_id=last_id(begun))
        whole = await second.events(body)
    for choice in range(3):
        said = tokens_of(begun + rest, choice)
        assert len(said) == LENGTH
        assert said == tokens_of(whole, choice)
    assert data_of(rest)[-2]["usage"]["completion_tokens"] == 3 * LENGTH


async def test_a_client_that_has_everything_gets_an_empty_stream(folder: Path) -> None:
    async with two_ingresses(folder) as world:
        events = await world.ingresses[0].events(CHAT)
        assert data_of(events)[-1] == "[DONE]"
        assert not await world.ingresses[1].events(CHAT, last_event_id=last_id(events))


async def test_a_client_that_stays_away_is_cancelled(folder: Path) -> None:
    async with two_ingresses(folder, keep_s=0.3) as world:
        first, second = world.ingresses
        begun = await first.events({**CHAT, "max_tokens": 370}, count=3)
        await first.kill()
        await world.is_idle()
        kept = await second.frontend.find_stream(last_id(begun).partition("-")[0], "")
        async with asyncio.timeout(PATIENCE_S):
            while kept is not None:
                await asyncio.sleep(0.05)
                kept = await second.frontend.find_stream(last_id(begun).partition("-")[0], "")
        for instance in world.instances:
            instance.check_integrity()


async def test_a_client_that_leaves_a_living_ingress_costs_no_more_steps(folder: Path) -> None:
    body = {**CHAT, "max_tokens": 370}
    async with two_ingresses(folder) as world:
        begun = await world.ingresses[0].events(body, count=5)
        await world.is_idle()
        num_computed = world.num_computed
        assert num_computed < 300
        rest = await world.ingresses[1].events(body, last_event_id=last_id(begun))
        assert len(tokens_of(begun + rest)) == 370
        assert world.num_computed < 420


async def test_without_resume_s_events_have_no_ids_and_end_with_their_ingress(folder: Path) -> None:
    async with two_ingresses(folder, keep_s=0.0) as world:
        first = world.ingresses[0]
        begun = await first.events({**CHAT, "max_tokens": 370}, count=5)
        assert all(event.startswith("data: ") for event in begun)
        await first.kill()
        await world.is_idle()


async def status_of(ingress: Ingress, **headers: str) -> tuple[int, str]:
    response: httpx.Response = await ingress.post(CHAT, **headers)
    return response.status_code, response.text


async def test_only_its_owner_gets_the_rest(folder: Path) -> None:
    async with two_ingresses(folder, rules=TWO_TENANTS) as world:
        first, second = world.ingresses
        begun = await first.events(CHAT, authorization="Bearer k1")
        stolen = await second.events(CHAT, authorization="Bearer k2", last_event_id=last_id(begun[:5]))
        rest = await second.events(CHAT, authorization="Bearer k1", last_event_id=last_id(begun[:5]))
        assert rest == begun[5:]
        num_computed = world.num_computed
        assert num_computed > 2 * LENGTH, "the other tenant's request is one of its own"
        assert len(stolen) == len(rest)


async def test_what_is_no_id_and_another_body_are_refused_in_words(folder: Path) -> None:
    async with two_ingresses(folder) as world:
        ingress = world.ingresses[0]
        begun = await ingress.events(CHAT, count=5)
        for wrong in ("7", "a:b", "x" * 32 + "-5:3", "0" * 32 + "-5:-3", "0" * 32 + "-5:"):
            status, text = await status_of(ingress, last_event_id=wrong)
            assert status == 400
            assert "Last-Event-ID" in text
        other = await ingress.post({**CHAT, "max_tokens": 3}, last_event_id=last_id(begun))
        assert other.status_code == 422
        assert "another request" in other.text
        two = await ingress.post({**CHAT, "n": 2}, last_event_id="0" * 32 + "-5:3")
        assert two.status_code == 400
        assert "choices" in two.text


async def test_two_clients_read_one_answer_at_once(folder: Path) -> None:
    body = {**CHAT, "max_tokens": 200}
    async with two_ingresses(folder) as world:
        first, second = world.ingresses
        begun = await first.events(body, count=3)
        streams = await asyncio.gather(
            *(one.events(body, last_event_id=last_id(begun)) for one in (first, second, second))
        )
        assert streams[0] == streams[1] == streams[2]
        assert len(tokens_of(begun + streams[0])) == 200
        await until(lambda: not world.num_running)
