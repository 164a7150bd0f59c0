"""/v1/conversations, /v1/responses/compact and `truncation`, through the openai client."""

from dataclasses import replace
from typing import Any

import openai
import pytest
from openai.types.conversations import Conversation, ConversationDeletedResource, ConversationItemList
from openai.types.responses import CompactedResponse, Response
from pydantic import TypeAdapter

from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.api.harness import SETTINGS, Api
from tests.cluster.ingress.api.template_fakes import last_rendered, served

HELLO: Any = {"type": "message", "role": "user", "content": "Hello."}


def texts(items: Any) -> list[str]:
    return [part.text for item in items for part in item.content]


async def test_a_conversation_is_made_read_changed_and_deleted() -> None:
    conversations = Api(FakeGenerator()).openai.conversations
    made = await conversations.create(items=[HELLO], metadata={"a": "b"})
    assert (made.object, made.metadata) == ("conversation", {"a": "b"})
    assert await conversations.retrieve(made.id) == made
    changed = await conversations.update(made.id, metadata={"c": "d"})
    assert (changed.id, changed.created_at, changed.metadata) == (made.id, made.created_at, {"c": "d"})
    gone = await conversations.delete(made.id)
    assert (gone.id, gone.deleted, gone.object) == (made.id, True, "conversation.deleted")
    with pytest.raises(openai.NotFoundError) as refused:
        await conversations.retrieve(made.id)
    assert refused.value.code == "conversation_not_found"


async def test_its_items_are_added_listed_read_and_deleted() -> None:
    items = Api(FakeGenerator()).openai.conversations
    made = await items.create(items=[HELLO])
    added = await items.items.create(
        made.id, items=[{"role": "user", "content": [{"type": "input_text", "text": "One."}]}, HELLO]
    )
    assert texts(added.data) == ["One.", "Hello."]
    assert (added.first_id, added.last_id) == (added.data[0].id, added.data[1].id)
    listed = [item async for item in items.items.list(made.id, order="asc")]
    assert texts(listed) == ["Hello.", "One.", "Hello."]
    assert len({item.id for item in listed}) == 3
    newest = await items.items.list(made.id, limit=1)
    assert (texts(newest.data), newest.has_more) == (["Hello."], True)
    one: Any = await items.items.retrieve(added.first_id, conversation_id=made.id)
    assert texts([one]) == ["One."]
    await items.items.delete(added.first_id, conversation_id=made.id)
    assert texts([item async for item in items.items.list(made.id, order="asc")]) == ["Hello.", "Hello."]
    with pytest.raises(openai.NotFoundError):
        await items.items.retrieve(added.first_id, conversation_id=made.id)


@pytest.mark.parametrize("as_object", [False, True])
async def test_turns_of_responses_become_part_of_it(as_object: bool) -> None:
    api = served("Yes.")
    made = await api.openai.conversations.create(items=[HELLO])
    named: Any = {"id": made.id} if as_object else made.id
    answer = await api.openai.responses.create(model=NAME, input="And then?", conversation=named)
    assert answer.conversation is not None
    assert answer.conversation.id == made.id
    assert [m["content"] for m in last_rendered(api)["messages"]] == ["Hello.", "And then?"]
    async with api.openai.responses.stream(model=NAME, input="More.", conversation=named) as events:
        await events.until_done()
    said = [m["content"] for m in last_rendered(api)["messages"]]
    assert said == ["Hello.", "And then?", "Yes.", "More."]
    kept = [item async for item in api.openai.conversations.items.list(made.id, order="asc")]
    assert texts(kept) == [*said, "Yes."]


async def test_what_does_not_go_together_is_refused() -> None:
    api = served("Yes.")
    made = await api.openai.conversations.create()
    first = await api.openai.responses.create(model=NAME, input="x")
    with pytest.raises(openai.BadRequestError, match="does not go with previous_response_id"):
        await api.openai.responses.create(
            model=NAME, input="x", conversation=made.id, previous_response_id=first.id
        )
    with pytest.raises(openai.NotFoundError, match="no conversation 'conv_none'"):
        await api.openai.responses.create(model=NAME, input="x", conversation="conv_none")


async def test_the_oldest_make_room_and_none_is_larger_than_the_bound() -> None:
    api = Api(FakeGenerator(), replace(SETTINGS, response_store_bytes=2000))
    conversations = api.openai.conversations
    first = await conversations.create(items=[{**HELLO, "content": "x" * 700}])
    second = await conversations.create(items=[{**HELLO, "content": "x" * 700}])
    await conversations.retrieve(first.id)
    third = await conversations.create(items=[{**HELLO, "content": "x" * 700}])
    for kept in (first, third):
        await conversations.retrieve(kept.id)
    with pytest.raises(openai.NotFoundError):
        await conversations.retrieve(second.id)
    with pytest.raises(openai.BadRequestError, match=r"serve\.response_store_bytes"):
        await conversations.items.create(third.id, items=[{**HELLO, "content": "x" * 2000}])
    assert texts([item async for item in conversations.items.list(third.id)]) == ["x" * 700]


async def test_answers_are_what_their_types_say() -> None:
    api = served("Yes.")
    made = await api.http.post("/v1/conversations", json={"items": [HELLO]})
    TypeAdapter(Conversation).validate_json(made.content, strict=True)
    path = f"/v1/conversations/{made.json()['id']}"
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    added = await api.http.post(
        f"{path}/items",
        json={"items": [
            {"role": "assistant", "content": "x"}, call, {"type": "function_call_output", "call_id": "c", "output": "y"}
        ]},
    )  # fmt: skip
    TypeAdapter(ConversationItemList).validate_json(added.content, strict=True)
    TypeAdapter(ConversationItemList).validate_json(
        (await api.http.get(f"{path}/items")).content, strict=True
    )
    body = {"model": NAME, "input": "x", "conversation": made.json()["id"]}
    TypeAdapter(Response).validate_json((await api.post("/v1/responses", body)).content, strict=True)
    TypeAdapter(ConversationDeletedResource).validate_json((await api.http.delete(path)).content, strict=True)


async def test_a_compacted_conversation_goes_on_from_its_summary() -> None:
    api = served("They greeted each other.")
    conversation: list[Any] = [
        HELLO,
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "How?"},
    ]
    short = await api.openai.responses.compact(model=NAME, input=conversation, instructions="Be kind.")
    asked = last_rendered(api)["messages"]
    assert asked[0] == {"role": "system", "content": "Be kind."}
    assert "Summarise" in asked[-1]["content"]
    assert [item.type for item in short.output] == ["message", "message", "compaction"]
    assert short.usage.total_tokens == short.usage.input_tokens + short.usage.output_tokens
    items: list[Any] = [item.model_dump(exclude_none=True, warnings=False) for item in short.output]
    await api.openai.responses.create(model=NAME, input=[*items, {"role": "user", "content": "Go on."}])
    said = [message["content"] for message in last_rendered(api)["messages"]]
    assert said[:2] == ["Hello.", "How?"]
    assert "They greeted each other." in said[2]
    assert said[3] == "Go on."
    again = await api.openai.responses.compact(model=NAME, input=items)
    assert [item.type for item in again.output] == ["message", "message", "compaction"]


async def test_a_stored_response_can_be_compacted() -> None:
    api = served("Yes.")
    first = await api.openai.responses.create(model=NAME, input="Hello.")
    short = await api.openai.responses.compact(model=NAME, previous_response_id=first.id)
    assert len(short.output) == 2
    assert short.object == "response.compaction"
    assert set(CompactedResponse.model_fields) >= set(short.model_dump(exclude_unset=True, warnings=False))
    refused = await api.post("/v1/responses/compact", {"model": NAME})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")


async def test_another_servers_compaction_is_refused_since_nothing_is_left_without_it() -> None:
    item = {"type": "compaction", "encrypted_content": "gAAAAB"}
    refused = await served("x").post("/v1/responses", {"model": NAME, "input": [item]})
    assert refused.status_code == 400
    assert "another server's secret" in refused.text


async def test_with_truncation_the_oldest_turns_are_left_out() -> None:
    api = served("Yes.")
    turns: list[Any] = [{"role": "developer", "content": "Be brief."}]
    for number in range(40):
        turns += [
            {"role": "user", "content": f"{number} " + "x" * 100},
            {"role": "assistant", "content": "y" * 60},
        ]
    turns.append({"role": "user", "content": "Last."})
    body = {"model": NAME, "input": turns, "max_output_tokens": 20}
    refused = await api.post("/v1/responses", body)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    answer = await api.post("/v1/responses", {**body, "truncation": "auto"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["truncation"] == "auto"
    said = last_rendered(api)["messages"]
    assert (said[0]["content"], said[1]["role"], said[-1]["content"]) == ("Be brief.", "user", "Last.")
    assert 3 < len(said) < 40
    assert f"the first {len(turns) - len(said)} items" in answer.headers["x-baton-warning"]
    one_turn_more = [turns[0], *turns[len(turns) - len(said) - 1 :]]
    longer = await api.openai.responses.input_tokens.count(model=NAME, input=one_turn_more)
    assert longer.input_tokens > 4000 - 20
    alone = {**body, "input": [*turns[:5], {"role": "user", "content": "x" * 5000}], "truncation": "auto"}
    refused = await api.post("/v1/responses", alone)
    assert refused.json()["error"]["code"] == "context_length_exceeded"


async def test_what_fits_is_left_whole() -> None:
    api = served("Yes.")
    answer = await api.post("/v1/responses", {"model": NAME, "input": [HELLO, HELLO], "truncation": "auto"})
    assert answer.status_code == 200
    assert len(last_rendered(api)["messages"]) == 2
    assert "x-baton-warning" not in answer.headers
