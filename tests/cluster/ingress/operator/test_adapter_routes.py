"""vLLM's routes for adapters: who may use them, what they answer, and that models say what is loaded."""

import time
from collections import ChainMap
from dataclasses import replace
from typing import Any

import pytest
from pydantic import SecretStr

from cluster.ingress.tenants.access import Rules, TenantRules
from core.config.adapter_config import ServedAdapter
from core.errors import ConfigError, ReplicaLost, RequestError
from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.api.harness import CLASSES, COMPLETIONS, OK, OPEN, SETTINGS, Api

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
FIXED = {"fixed": ServedAdapter("fixed@0", "/fixed")}
RULES = Rules(
    CLASSES, {"": TenantRules((SecretStr("root"),)), "acme": TenantRules((SecretStr("tenant"),), ("chat",))}
)


def describe(name: str, path: str) -> ServedAdapter:
    if not path.startswith("/adapters"):
        raise ConfigError(f"adapter {name!r}: {path} is not in one of adapters.folders")
    return ServedAdapter(f"{name}@1", path)


def api(rules: Rules = OPEN) -> Api:
    generator = FakeGenerator()
    adapters = ChainMap(generator.adapters.served, FIXED)
    return Api(generator, replace(SETTINGS, adapters=adapters, describe_adapter=describe), rules)


def body(**more: Any) -> dict[str, Any]:
    return {"lora_name": "sql", "lora_path": "/adapters/sql", **more}


async def test_what_is_loaded_is_a_model_until_it_is_unloaded() -> None:
    made = api()
    answer = await made.post(LOAD, body())
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    assert made.generator.adapters.loaded == [("sql@1", "/adapters/sql", False)]
    listed = {model.id: model.model_extra or {} for model in (await made.openai.models.list()).data}
    assert list(listed) == [NAME, "fixed", "sql"]
    assert (listed["sql"]["parent"], listed["sql"]["root"]) == (NAME, "/adapters/sql")
    assert (await made.post(COMPLETIONS, OK | {"model": "sql"})).status_code == 200
    assert made.generator.requests[-1].adapter == "sql@1"
    answer = await made.post(UNLOAD, {"lora_name": "sql", "lora_int_id": 3})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert (await made.post(COMPLETIONS, OK | {"model": "sql"})).status_code == 404


async def test_gateways_see_which_adapters_requests_have() -> None:
    async def infos(made: Api) -> list[str]:
        text = (await made.http.get("/metrics")).text
        return [line for line in text.splitlines() if line.startswith("vllm:lora_requests_info")]

    generator = FakeGenerator()
    made = Api(generator, replace(SETTINGS, max_adapters=5))
    for in_use in ((), ("poet", "sql")):
        generator.adapters.in_use = in_use
        (info,) = await infos(made)
        said = f'{{max_lora="5",running_lora_adapters="{",".join(in_use)}",waiting_lora_adapters=""}} '
        assert info.startswith("vllm:lora_requests_info" + said)
        assert abs(float(info.rpartition(" ")[2]) - time.time()) < 3600
    assert not await infos(Api(FakeGenerator()))


async def test_in_place_is_passed_on() -> None:
    made = api()
    await made.post(LOAD, body(load_inplace=True))
    assert made.generator.adapters.loaded[0][2]


@pytest.mark.parametrize("route", [LOAD, UNLOAD])
async def test_they_are_for_the_operator_alone(route: str) -> None:
    made = api(RULES)
    assert (await made.post(route, body())).status_code == 401
    refused = await made.post(route, body(), Authorization="Bearer tenant")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_scope")
    assert not made.generator.adapters.loaded


@pytest.mark.parametrize("route", [LOAD, UNLOAD])
async def test_they_are_off_where_no_folder_is_named(route: str) -> None:
    made = Api(FakeGenerator())
    refused = await made.post(route, body())
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "adapters_are_fixed")
    assert "adapters.folders" in refused.json()["error"]["message"]


async def test_a_path_that_may_not_be_loaded_is_refused_before_anybody_is_asked() -> None:
    made = api()
    refused = await made.post(LOAD, body(lora_path="/etc"))
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "lora_path"
    assert "adapters.folders" in refused.json()["error"]["message"]
    assert not made.generator.adapters.loaded


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestError("instance i: no", status=400), 400),
        (RequestError("The lora adapter 'sql' cannot be found.", status=404), 404),
        (ReplicaLost("the scheduler did not answer"), 503),
    ],
)
async def test_what_the_cluster_says_is_answered(error: Exception, status: int) -> None:
    made = api()
    made.generator.adapters.refusal = error
    for route in (LOAD, UNLOAD):
        asked = body() if route == LOAD else {"lora_name": "sql"}
        answer = await made.post(route, asked)
        assert (answer.status_code, answer.json()["error"]["message"]) == (status, str(error))


@pytest.mark.parametrize(
    "given",
    [{"lora_path": "/adapters/sql"}, {"lora_name": "sql"}, {"lora_name": "", "lora_path": "/adapters/sql"}],
)
async def test_both_are_needed(given: dict[str, Any]) -> None:
    assert (await api().post(LOAD, given)).status_code == 400


async def test_a_parameter_that_is_not_known_is_named_in_the_answer() -> None:
    answer = await api().post(LOAD, body(is_3d_lora_weight=True))
    assert answer.status_code == 200
    assert "is_3d_lora_weight" in answer.headers["x-baton-warning"]
