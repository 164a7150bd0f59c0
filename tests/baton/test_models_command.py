"""`baton models` at a server in this process."""

import io
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import typer
from rich.console import Console

from baton.cli import models as command
from baton.cli.models import models
from core.errors import ConfigError

ENTRY = {
    "max_model_len": 200,
    "parent": None,
    "baton": {"state": "serving", "capabilities": ["completion", "tools"]},
}
LISTED = [
    {**ENTRY, "id": "a", "root": "a"},
    {**ENTRY, "id": "sql", "root": "/adapters/sql", "parent": "a"},
    {**ENTRY, "id": "b", "root": "b", "baton": {"state": "unavailable", "capabilities": ["embedding"]}},
]
SHOWN = {
    "details": {"family": "qwen2", "parameter_size": "1.5B", "quantization_level": "BF16"},
    "parameters": "top_k      20\n",
}


def answer(request: httpx.Request) -> httpx.Response:
    if request.headers.get("authorization") != "Bearer k":
        return httpx.Response(401, json={"error": {"message": "a valid API key is required"}})
    match request.url.path:
        case "/v1/models":
            return httpx.Response(200, json={"data": LISTED})
        case "/v1/models/sql":
            return httpx.Response(200, json=LISTED[1])
        case "/api/show":
            return httpx.Response(200, json=SHOWN)
        case _:
            return httpx.Response(
                404, json={"error": {"message": "the model 'c' does not exist; this server has 'a'"}}
            )


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    console = Console(width=120, record=True, file=io.StringIO())
    client, transport = httpx.Client, httpx.MockTransport(answer)

    def made(**settings: Any) -> httpx.Client:
        return client(**settings, transport=transport)

    monkeypatch.setattr(command.httpx, "Client", made)
    monkeypatch.setattr(command, "Console", lambda **_: console)
    return console.export_text


def test_all_are_listed_with_their_states(printed: Callable[[], str]) -> None:
    models("list", base_url="http://api/v1", api_key="k")
    lines = [line.split() for line in printed().splitlines()]
    assert ["a", "serving", "200", "completion,", "tools"] in lines
    assert ["sql", "serving", "a", "200", "completion,", "tools"] in lines
    assert ["b", "unavailable", "200", "embedding"] in lines


def test_one_is_shown(printed: Callable[[], str]) -> None:
    models("show", "sql", base_url="http://api", api_key="k")
    lines = [line.split() for line in printed().splitlines()]
    assert ["of", "a"] in lines
    assert ["weights", "1.5B", "BF16"] in lines
    assert ["sampling", "top_k", "20"] in lines


@pytest.mark.usefixtures("printed")
def test_what_the_server_refuses_is_said_in_its_words() -> None:
    with pytest.raises(ConfigError, match="valid API key"):
        models("list", base_url="http://api")
    with pytest.raises(ConfigError, match="'c' does not exist"):
        models("show", "c", base_url="http://api", api_key="k")
    for wrong in (("show", ""), ("pull", ""), ("list", "a"), ("cached", "a")):
        with pytest.raises(typer.BadParameter, match="takes (a|no) name"):
            models(*wrong)
