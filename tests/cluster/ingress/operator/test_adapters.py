"""`model` may name an adapter, on each route, and its requests carry it."""

from dataclasses import replace

import pytest

from core.config.adapter_config import ServedAdapter
from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.api.harness import COMPLETIONS, OK, OPEN, SETTINGS, Api
from tests.cluster.ingress.api.test_every_route import BODIES, ROUTES

ADAPTERS = {
    "sql": ServedAdapter("sql@12ab", "/adapters/sql"),
    "team/poet": ServedAdapter("team/poet@34cd", "/poet"),
}


def api() -> Api:
    return Api(FakeGenerator(), replace(SETTINGS, adapters=ADAPTERS, aliases=("alias",)), OPEN)


@pytest.mark.parametrize("route", ROUTES)
async def test_a_request_carries_the_adapter_that_its_model_names(route: str) -> None:
    made = api()
    for name in ("sql", NAME, "alias", "team/poet"):
        answer = await made.post(route, BODIES[route] | {"model": name})
        assert answer.status_code == 200
        assert answer.json()["model"] == name
    assert [request.adapter for request in made.generator.requests] == ["sql@12ab", "", "", "team/poet@34cd"]
    assert len({request.prefix_salt for request in made.generator.requests}) == 3


async def test_no_salt_of_a_client_is_that_of_an_adapter() -> None:
    made = api()
    await made.post(COMPLETIONS, OK | {"model": "sql"})
    (adapted,) = made.generator.requests
    for salt in (
        adapted.prefix_salt,
        adapted.prefix_salt.strip(),
        "\n" + adapted.adapter + "\n",
        adapted.adapter,
    ):
        await made.post(COMPLETIONS, OK | {"cache_salt": salt})
        assert made.generator.requests[-1].prefix_salt != adapted.prefix_salt


async def test_an_unknown_name_is_404_and_names_those_that_there_are() -> None:
    answer = await api().post(COMPLETIONS, OK | {"model": "poet"})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "model_not_found"
    assert all(repr(name) in error["message"] for name in (NAME, "alias", *ADAPTERS))


async def test_models_say_whose_adapters_they_are() -> None:
    made = api()
    listed = {model.id: model for model in (await made.openai.models.list()).data}
    assert list(listed) == [NAME, "alias", *ADAPTERS]
    assert (listed["sql"].model_extra or {})["parent"] == NAME
    assert (listed["sql"].model_extra or {})["root"] == "/adapters/sql"
    assert (listed[NAME].model_extra or {})["parent"] is None
    assert (await made.openai.models.retrieve("team/poet")).id == "team/poet"


@pytest.mark.parametrize("n", [1, 3])
async def test_each_choice_has_it(n: int) -> None:
    made = api()
    await made.post(COMPLETIONS, OK | {"model": "sql", "n": n})
    assert {request.adapter for request in made.generator.requests} == {"sql@12ab"}
    assert len(made.generator.requests) == n
