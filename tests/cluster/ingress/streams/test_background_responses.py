"""Background responses, and streams of responses, that outlive their ingress: through the openai SDK, too."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from cluster.ingress.responses import background_responses, response_store
from cluster.store import lease_keeper
from cluster.store.sql_store import SqlStore
from tests.cluster.ingress.api.fakes import NAME
from tests.cluster.ingress.streams.test_resumed_streams import TWO_TENANTS
from tests.cluster.ingress.streams.two_ingresses import (
    LENGTH,
    Ingress,
    data_of,
    last_id,
    make_model,
    two_ingresses,
)
from tests.patience import PATIENCE_S, until

PATH = "/v1/responses"
BODY: dict[str, Any] = {
    "model": NAME,
    "input": "Tell me.",
    "max_output_tokens": LENGTH,
    "ignore_eos": True,
    "temperature": 1.0,
}
LONG = {**BODY, "max_output_tokens": 300}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def leases_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody renews is anybody's after a moment; and nobody renews."""
    monkeypatch.setattr(response_store, "LEASE_S", 0.3)
    monkeypatch.setattr(lease_keeper, "RENEW_S", PATIENCE_S)
    monkeypatch.setattr(background_responses, "LOOK_S", 0.05)


async def ended(ingress: Ingress, response_id: str) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE_S):
        while (found := (await ingress.get(f"{PATH}/{response_id}")).json())["status"] == "in_progress":
            await asyncio.sleep(0.02)
    return found


def client(ingress: Ingress) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{ingress.url}/v1", api_key="k", max_retries=0)


@pytest.mark.usefixtures("leases_end_soon")
async def test_a_background_response_goes_on_without_its_ingress(folder: Path) -> None:
    async with two_ingresses(folder, store=SqlStore()) as world:
        first, second = world.ingresses
        begun = (await first.post({**LONG, "background": True}, path=PATH)).json()
        assert begun["status"] == "in_progress"
        await until(lambda: world.num_running > 0)
        await first.kill()
        found = await ended(second, begun["id"])
        assert (found["status"], found["id"]) == ("incomplete", begun["id"])
        assert found["usage"]["output_tokens"] == 300
        assert world.num_computed == found["usage"]["input_tokens"] + 299, "nothing was computed twice"
        assert found["created_at"] == begun["created_at"]
        await world.is_idle()


@pytest.mark.usefixtures("leases_end_soon")
async def test_an_ingress_that_ends_on_purpose_leaves_its_background_responses(folder: Path) -> None:
    async with two_ingresses(folder, store=SqlStore()) as world:
        first, second = world.ingresses
        begun = (await first.post({**LONG, "background": True}, path=PATH)).json()
        await until(lambda: world.num_running > 0)
        await first.frontend.close()
        found = await ended(second, begun["id"])
        assert found["status"] == "incomplete"
        assert found["usage"]["output_tokens"] == 300


async def test_a_background_response_is_streamed_from_any_event_on_at_any_ingress(folder: Path) -> None:
    async with two_ingresses(folder, store=SqlStore()) as world:
        first, second = world.ingresses
        seen: list[Any] = []
        async with client(first) as asks, client(second) as comes_back:
            streaming = await asks.responses.create(  # type: ignore[call-overload]
                model=NAME,
                input="Tell me.",
                max_output_tokens=LENGTH,
                background=True,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for event in streaming:
                seen.append(event)
                if len(seen) == 10:
                    await streaming.close()
                    break
            response_id, last = seen[0].response.id, seen[-1].sequence_number
            rest = await comes_back.responses.retrieve(response_id, stream=True, starting_after=last)
            seen += [event async for event in rest]
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
        whole = await ended(first, response_id)
        assert seen[-1].response.to_dict()["output"] == whole["output"]
        assert whole["usage"]["output_tokens"] == LENGTH


async def test_a_stream_of_a_response_is_had_by_its_id_from_another_ingress(folder: Path) -> None:
    async with two_ingresses(folder, store=SqlStore()) as world:
        first, second = world.ingresses
        begun = await first.events({**LONG, "stream": True}, path=PATH, count=12)
        await first.kill()
        response_id = data_of(begun)[0]["response"]["id"]
        where = f"{PATH}/{response_id}?stream=true"
        rest = await second.get_events(f"{where}&starting_after=11")
        assert [one["sequence_number"] for one in data_of(begun + rest)] == list(range(len(begun + rest)))
        assert data_of(rest)[-1]["response"]["usage"]["output_tokens"] == 300
        assert await second.get_events(where, last_event_id=last_id(begun)) == rest
        assert (await second.get(f"{PATH}/{response_id}")).json()["status"] == "incomplete", "it is stored"


async def test_a_turn_that_is_read_twice_is_in_its_conversation_once(folder: Path) -> None:
    async with two_ingresses(folder, store=SqlStore()) as world:
        first, second = world.ingresses
        kept = (await first.post({}, path="/v1/conversations")).json()["id"]
        body = {**BODY, "conversation": kept, "stream": True}
        whole = await first.events(body, path=PATH)
        again = await second.events(body, path=PATH, last_event_id=last_id(whole[:3]))
        assert again == whole[3:]
        items = (await second.get(f"/v1/conversations/{kept}/items")).json()["data"]
        assert [item["role"] for item in items] == ["assistant", "user"]


async def test_the_same_request_with_a_key_begins_one_background_response(folder: Path) -> None:
    async with two_ingresses(folder, store=SqlStore()) as world:
        first, second = world.ingresses
        body = {**BODY, "background": True}
        one = (await first.post(body, path=PATH, idempotency_key="a")).json()
        other = (await second.post(body, path=PATH, idempotency_key="a")).json()
        assert one["id"] == other["id"]
        found = await ended(second, one["id"])
        assert world.num_computed == found["usage"]["input_tokens"] + LENGTH - 1


async def test_events_that_nobody_may_have_are_refused_in_words(folder: Path) -> None:
    async with two_ingresses(folder, store=SqlStore(), rules=TWO_TENANTS) as world:
        ingress = world.ingresses[0]
        begun = await ingress.events({**BODY, "stream": True}, path=PATH, authorization="Bearer k1", count=3)
        where = f"{PATH}/{data_of(begun)[0]['response']['id']}?stream=true"
        for key, query, status, said in (
            ("k2", "", 404, "no response"),
            ("k1", "&starting_after=x", 400, "sequence_number"),
        ):
            with pytest.raises(AssertionError, match=f"{status}.*{said}"):
                await ingress.get_events(where + query, authorization=f"Bearer {key}")
    async with two_ingresses(folder, store=SqlStore(), keep_s=0.05) as world:
        ingress = world.ingresses[0]
        done = (await ingress.post(BODY, path=PATH)).json()
        with pytest.raises(AssertionError, match=r"404.*not kept any more"):
            await ingress.get_events(f"{PATH}/{done['id']}?stream=true")
