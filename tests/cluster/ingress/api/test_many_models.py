"""Several models behind one door: each request goes to the model that it names, and to no other."""

import asyncio
import threading
from dataclasses import replace
from typing import Any, ClassVar

import httpx
import openai
import pytest
from pydantic import SecretStr

from cluster.ingress.batches.batch_runner import BatchRunner
from cluster.ingress.generation.request_params import ApiSettings
from cluster.ingress.generation.served_model import ServedModel
from cluster.ingress.http_app import create_app_of
from cluster.ingress.telemetry.joined_metrics import joined_registry
from cluster.ingress.telemetry.observers import make_observers
from cluster.ingress.tenants.access import Access, Rules, TenantRules
from cluster.store.sql_store import SqlStore
from core.config.adapter_config import ServedAdapter
from core.errors import ReplicaLost
from core.reports import Status
from core.types import Slo
from tests.cluster.ingress.api.fakes import ByteTokenizer, FakeGenerator
from tests.cluster.ingress.api.harness import CLASSES, OPEN, SETTINGS
from tests.patience import PATIENCE_S

MESSAGES = [{"role": "user", "content": "x"}]
GENERATING = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "x"},
    "/infill": {"input_prefix": "x", "input_suffix": "y"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 20},
    "/v1/responses": {"input": "x"},
    "/api/chat": {"messages": MESSAGES, "stream": False},
    "/api/generate": {"prompt": "x", "stream": False},
}
MARKS = "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"


class Filling(ByteTokenizer):
    """Has the tokens that fill in the middle."""

    added_tokens: ClassVar = dict(zip(MARKS, (65, 66, 67), strict=True))
    special_tokens: ClassVar = added_tokens


class Stuck(Filling):
    """Has a book before it, and is not done with it until `go_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        assert self.go_on.wait(PATIENCE_S)
        return super().encode(text, add_special_tokens=add_special_tokens)


class Lost(FakeGenerator):
    """A model whose scheduler does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.ready_answer = (False, "the scheduler is not known yet")

    async def status(self) -> Status:
        raise ReplicaLost("the scheduler is not known yet")

    async def hint_session(self, tenant: str, session: str, *, release: bool) -> list[str]:
        raise ReplicaLost("the scheduler is not known yet")


def row(name: str, **keys: Any) -> ApiSettings:
    return replace(SETTINGS, model_name=name, **keys)


class Door:
    """Models `a` (alias `first`), `b`, and `c`, whose scheduler is lost."""

    def __init__(self, rules: Rules = OPEN, tokenizer_of_a: ByteTokenizer | None = None, **keys: Any) -> None:
        """`keys`: settings that all models have."""
        own = {"chat": Slo(name="chat", ttft_s=9.0, tpot_s=1.0)}
        rows = [row("a", aliases=("first",), **keys), row("b", slo_classes=own, **keys), row("c", **keys)]
        self.generators = {"a": FakeGenerator("from a"), "b": FakeGenerator("from b"), "c": Lost()}
        self.served = [
            ServedModel(
                generator=self.generators[one.model_name],
                tokenizer=(tokenizer_of_a if one.model_name == "a" else None) or Filling(),
                settings=one,
                observers=make_observers(one.model_name),
            )
            for one in rows
        ]
        door, self.store = make_observers(""), SqlStore()
        registries = {model.name: model.observers.registry for model in self.served}
        door = replace(door, registry=joined_registry(door.registry, registries))
        self.access = Access(rules)
        self.app = create_app_of(self.served, self.access, door, self.store)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://api")

    async def get(self, path: str, key: str = "") -> Any:
        answer = await self.http.get(path, headers={"authorization": f"Bearer {key}"} if key else {})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def asked(self) -> list[str]:
        """The models that were asked to generate, and are forgotten."""
        found = [name for name, each in self.generators.items() for _ in each.requests]
        for each in self.generators.values():
            each.requests.clear()
        return found


@pytest.mark.parametrize("path", GENERATING)
async def test_every_api_asks_the_model_that_is_named(path: str) -> None:
    door = Door()
    for name, want in (("b", "b"), ("a", "a"), ("first", "a")):
        answer = await door.http.post(path, json={"model": name, **GENERATING[path]})
        assert answer.status_code == 200, answer.text
        assert f"from {want}" in answer.text
        assert door.asked() == [want]
    unknown = await door.http.post(path, json={"model": "d", **GENERATING[path]})
    assert unknown.status_code == 404
    assert "this server has 'a', 'first', 'b', 'c'" in unknown.text


async def test_a_long_body_is_read_once_and_goes_to_its_model() -> None:
    door = Door(max_context_tokens=200_000)
    for name in "ab":
        answer = await door.http.post("/v1/completions", json={"model": name, "prompt": "y" * 100_000})
        assert answer.json()["choices"][0]["text"] == f"from {name}"


async def test_a_book_for_one_model_keeps_no_other_waiting() -> None:
    stuck = Stuck()
    door = Door(tokenizer_of_a=stuck, max_context_tokens=200_000)
    book = "y" * 100_000
    waiting = [
        asyncio.create_task(door.http.post("/v1/completions", json={"model": "a", "prompt": book}))
        for _ in range(8)
    ]
    for text in (book, "y" * 5000, "y"):
        answer = await door.http.post("/v1/completions", json={"model": "b", "prompt": text})
        assert answer.json()["choices"][0]["text"] == "from b"
    assert not any(task.done() for task in waiting)
    stuck.go_on.set()
    assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}


async def test_what_names_no_model_goes_to_the_first() -> None:
    door = Door()
    assert (await door.http.post("/infill", json=GENERATING["/infill"])).status_code == 200
    assert door.asked() == ["a"]
    assert (await door.http.post("/api/show", json={"model": ""})).status_code == 400


async def test_ollamas_names_may_have_a_tag() -> None:
    door = Door()
    body = {"model": "b:latest", "messages": MESSAGES, "stream": False}
    assert (await door.http.post("/api/chat", json=body)).json()["message"]["content"] == "from b"
    assert (await door.http.post("/v1/chat/completions", json=body)).status_code == 404


async def test_all_models_are_listed_with_their_states() -> None:
    door = Door()
    listed = (await door.get("/v1/models"))["data"]
    states = {each["id"]: each["baton"]["state"] for each in listed}
    assert states == {"a": "serving", "first": "serving", "b": "serving", "c": "unavailable"}
    assert (await door.get("/v1/models/b"))["root"] == "b"
    assert (await door.http.get("/v1/models/d")).status_code == 404
    tags = [each["name"] for each in (await door.get("/api/tags"))["models"]]
    assert tags == ["a:latest", "first:latest", "b:latest", "c:latest"]
    assert [each["name"] for each in (await door.get("/api/ps"))["models"]] == tags[:3]
    client = openai.AsyncOpenAI(base_url="http://api/v1", api_key="k", http_client=door.http)
    assert [each.id async for each in await client.models.list()] == ["a", "first", "b", "c"]


async def test_a_lost_model_makes_the_door_neither_closed_nor_slower_for_others() -> None:
    door = Door()
    assert await door.get("/ready") == {"status": "ready", "models_not_ready": 1}
    hint = {"session": "s", "action": "release"}
    assert (await door.http.post("/v1/cache_hints", json=hint)).json()["instances"] == ["one", "one"]
    for name in "ab":
        door.generators[name].ready_answer = (False, "no decode instance is alive")
    lost = await door.http.get("/ready")
    assert (lost.status_code, lost.json()["reason"]) == (503, "no decode instance is alive")


async def test_a_tenant_sees_its_models_and_no_others() -> None:
    rules = Rules(
        CLASSES,
        {
            "": TenantRules((SecretStr("all"),)),
            "acme": TenantRules((SecretStr("acme"),), models=("b",)),
            "none": TenantRules((SecretStr("none"),), models=("gone",)),
        },
    )
    door, acme = Door(rules), {"authorization": "Bearer acme"}
    for path, body in GENERATING.items():
        hidden = await door.http.post(path, json={"model": "first", **body}, headers=acme)
        assert (hidden.status_code, "this server has 'b'" in hidden.text) == (404, True)
        assert "'a'" not in hidden.text
    assert door.asked() == []
    assert [each["id"] for each in (await door.get("/v1/models", "acme"))["data"]] == ["b"]
    assert [each["name"] for each in (await door.get("/api/tags", "acme"))["models"]] == ["b:latest"]
    assert (await door.http.get("/v1/models/a", headers=acme)).status_code == 404
    hint = {"session": "s", "action": "release"}
    assert (await door.http.post("/v1/cache_hints", json=hint, headers=acme)).json()["instances"] == ["one"]
    assert (door.generators["a"].hinted, len(door.generators["b"].hinted)) == ([], 1)
    assert (await door.http.post("/infill", json=GENERATING["/infill"], headers=acme)).status_code == 200
    assert door.asked() == ["b"]
    assert (await door.get("/v1/models", "none"))["data"] == []
    body = {"model": "b", **GENERATING["/v1/completions"]}
    none = await door.http.post("/v1/completions", json=body, headers={"authorization": "Bearer none"})
    assert (none.status_code, "this server has none" in none.text) == (404, True)
    assert len((await door.get("/v1/models", "all"))["data"]) == 4


async def test_a_class_has_the_targets_of_its_model() -> None:
    door = Door()
    for name, ttft_s in (("a", 1.0), ("b", 9.0)):
        body = {"model": name, "prompt": "x"}
        await door.http.post("/v1/completions", json=body, headers={"x-slo-class": "chat"})
        assert door.generators[name].requests[-1].slo.ttft_s == ttft_s


async def test_responses_go_on_at_any_model() -> None:
    door = Door()
    first = (await door.http.post("/v1/responses", json={"model": "a", "input": "x"})).json()
    body = {"model": "b", "input": "y", "previous_response_id": first["id"]}
    second = (await door.http.post("/v1/responses", json=body)).json()
    assert [each["model"] for each in (first, second)] == ["a", "b"]
    assert (await door.get(f"/v1/responses/{second['id']}"))["model"] == "b"
    begun = (
        await door.http.post("/v1/responses", json={"model": "b", "input": "x", "background": True})
    ).json()
    ended = await door.http.post(f"/v1/responses/{begun['id']}/cancel")
    assert ended.json()["status"] in ("cancelled", "completed")


async def test_adapters_belong_to_a_model() -> None:
    def described(name: str, path: str) -> ServedAdapter:
        return ServedAdapter(f"{name}@1", path)

    door = Door(describe_adapter=described)
    for model in door.served:
        object.__setattr__(model.settings, "adapters", model.generator.adapters.served)
    load = {"lora_name": "sql", "lora_path": "/x", "model": "b"}
    assert (await door.http.post("/v1/load_lora_adapter", json=load)).status_code == 200
    assert list(door.generators["b"].adapters.served) == ["sql"]
    answer = await door.http.post("/v1/completions", json={"model": "sql", "prompt": "x"})
    assert answer.json()["choices"][0]["text"] == "from b"
    assert door.generators["b"].requests[-1].adapter == "sql@1"
    assert (await door.http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})).status_code == 200
    assert not door.generators["b"].adapters.served


async def test_metrics_have_the_model_as_a_label() -> None:
    door = Door()
    await door.http.post("/v1/completions", json={"model": "b", "prompt": "x"})
    await door.http.post("/v1/completions", json={"model": "d", "prompt": "x"})
    text = (await door.http.get("/metrics")).text
    assert 'baton_requests_finished_total{model="b",reason="stop"} 1.0' in text
    assert 'baton_requests_finished_total{model="a",reason="stop"} 0.0' in text
    assert 'baton_http_requests_total{model="b",route="/v1/completions",status="200"} 1.0' in text
    assert 'baton_http_requests_total{model="",route="/v1/completions",status="404"} 1.0' in text
    assert 'baton_scheduler_up{model="a"} 1.0' in text
    assert 'baton_scheduler_up{model="c"} 0.0' in text
    assert 'baton_scheduler_up{model=""}' not in text
    assert text.count("# TYPE baton_requests_finished_total counter") == 1
    assert 'vllm:request_success_total{finished_reason="stop",model_name="b"} 1.0' in text


async def test_an_operator_looks_at_each_model() -> None:
    door = Door()
    seen = await door.get("/cluster?model=b")
    assert seen["model"] == "b"
    assert {each["model"]: each["why_not"] for each in seen["models"]} == {
        "a": "",
        "b": "",
        "c": "its scheduler does not answer",
    }
    assert (await door.get("/cluster"))["model"] == "a"
    assert (await door.http.get("/cluster?model=d")).status_code == 404
    dropped = await door.http.post("/flush_cache?model=b")
    assert set(dropped.json()["dropped"]) == {"one", "other"}


async def test_the_lines_of_a_batch_name_their_models() -> None:
    door = Door(file_store_bytes=1 << 20)
    lines = "".join(
        f'{{"custom_id": "{name}", "method": "POST", "url": "/v1/completions", "body": {{"model": "{name}", "prompt": "x"}}}}\n'
        for name in ("b", "a", "d")
    )
    form = {"file": ("in.jsonl", lines.encode()), "purpose": (None, "batch")}
    file = (await door.http.post("/v1/files", files=form)).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = (await door.http.post("/v1/batches", json=asked)).json()
    assert batch["model"] == "b"
    runner = BatchRunner(
        door.app, door.store, door.access, "a", at_once=4, slo_class="standard", more_models=["b", "c"]
    )
    running = asyncio.create_task(runner.run())
    while batch["status"] != "completed":
        batch = await door.get(f"/v1/batches/{batch['id']}")
        await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    answers = (await door.http.get(f"/v1/files/{batch['output_file_id']}/content")).text
    assert ("from a" in answers, "from b" in answers) == (True, True)
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}


async def test_the_description_of_the_api_is_that_of_one_model() -> None:
    one = create_app_of(Door().served[:1], Access(OPEN), make_observers(""))
    alone = httpx.AsyncClient(transport=httpx.ASGITransport(one), base_url="http://api")
    assert (await Door().http.get("/openapi.json")).content == (await alone.get("/openapi.json")).content
