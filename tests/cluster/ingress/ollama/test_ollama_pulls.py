"""What an operator has fetched to an ingress' host, or removed from it, and what nobody has."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from cluster.ingress.http.http_server import HttpServer
from cluster.ingress.ollama.public_transport import PublicTransport
from cluster.ingress.tenants.access import Rules, TenantRules
from core.errors import ConfigError
from models.files.pulled_models import InUse, PulledModels
from models.files.pulled_names import pulled_name
from models.pulling.http_files import make_client
from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.api.harness import CLASSES, SETTINGS, Api
from tests.models.pulling.fake_places import WEIGHTS, FakePlaces

RULES = Rules(CLASSES, {"": TenantRules((SecretStr("boss"), SecretStr("user inference")))})
BOSS, USER = {"authorization": "Bearer boss"}, {"authorization": "Bearer user"}
WHOLE = ["pulling manifest", "verifying sha256 digest", "writing manifest", "success"]


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakePlaces]:
    with FakePlaces().running() as places:
        monkeypatch.setenv("HF_ENDPOINT", places.url)
        monkeypatch.setenv("MODELSCOPE_DOMAIN", places.url)
        monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.delenv("BATON_CACHE_BYTES", raising=False)
        yield places


async def asked(api: Api, path: str, key: dict[str, str], **body: Any) -> httpx.Response:
    headers = {"content-type": "application/json", **key}
    method = "DELETE" if path.endswith("delete") else "POST"
    return await api.http.request(method, path, content=json.dumps(body), headers=headers, timeout=60)


async def test_an_operator_has_a_model_fetched_and_removed(places: FakePlaces) -> None:
    api = Api(FakeGenerator(), SETTINGS, RULES)
    got = await asked(api, "/api/pull", BOSS, model="hf.co/org/name:latest")
    assert got.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in got.text.splitlines()]
    assert [line["status"] for line in lines if "digest" not in line] == WHOLE
    last = [line for line in lines if line.get("total") == len(WEIGHTS)][-1]
    digest = places.sha256("model.safetensors")
    counted = {"digest": f"sha256:{digest}", "total": len(WEIGHTS), "completed": len(WEIGHTS)}
    assert last == {"status": f"pulling {digest[:12]}", **counted}
    assert [each.model.name for each in PulledModels().cached()] == ["org/name"]
    again = await asked(api, "/api/pull", BOSS, name="org/name", stream=False)
    assert again.json() == {"status": "success"}
    assert places.bytes_asked("model.safetensors") == [0]
    assert PulledModels().found("org/name") is not None, "this process uses it now"


async def test_a_model_is_removed_unless_it_is_used(places: FakePlaces) -> None:
    api = Api(FakeGenerator(), SETTINGS, RULES)
    await asked(api, "/api/pull", BOSS, model="modelscope.cn/org/name", stream=False)
    name = pulled_name("modelscope://org/name")
    assert name is not None
    with PulledModels().changing(name):
        used = await asked(api, "/api/delete", BOSS, model="modelscope.cn/org/name")
    assert (used.status_code, "is being served" in used.json()["error"]) == (409, True)
    gone = await asked(api, "/api/delete", BOSS, name="modelscope.cn/org/name:latest")
    assert (gone.status_code, gone.content) == (200, b"")
    assert PulledModels().cached() == []
    assert (await asked(api, "/api/delete", BOSS, model="modelscope.cn/org/name")).status_code == 404


async def test_no_other_key_has_anything_fetched_or_removed(places: FakePlaces) -> None:
    api = Api(FakeGenerator(), SETTINGS, RULES)
    for path in ("/api/pull", "/api/delete"):
        refused = await asked(api, path, USER, model="org/name")
        assert (refused.status_code, "operator" in refused.json()["error"]) == (403, True)
    assert (await asked(api, "/api/pull", USER, model=NAME)).status_code == 200, "it is served"
    assert places.asked == []


@pytest.mark.parametrize(
    ("name", "status", "why"),
    [
        ("org/none", 400, "cannot get org/none from the hub"),
        ("s3://bucket/folder", 404, "what can be pulled here is"),
        ("http://127.0.0.1:{port}/kept/m.gguf", 400, "has no public address, or names a port"),
        ("http://localhost/kept/m.gguf", 400, "has no public address"),
        ("http://169.254.169.254/latest/m.gguf", 400, "has no public address"),
        ("../../etc", 404, "does not exist"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_what_cannot_be_pulled_has_a_status(
    places: FakePlaces, name: str, status: int, why: str, stream: bool
) -> None:
    places.files["m.gguf"] = b"GGUF"
    api = Api(FakeGenerator(), SETTINGS, RULES)
    got = await asked(api, "/api/pull", BOSS, model=name.format(port=places.port), stream=stream)
    assert (got.status_code, why in got.json()["error"]) == (status, True), got.text
    assert places.bytes_asked("m.gguf") == []


async def test_what_fails_later_is_the_streams_last_line(places: FakePlaces) -> None:
    places.stated["model.safetensors"] = "0" * 64
    got = await asked(Api(FakeGenerator(), SETTINGS, RULES), "/api/pull", BOSS, model="org/name")
    assert "should have 0000" in json.loads(got.text.splitlines()[-1])["error"]


async def test_a_pull_ends_with_its_client_and_what_came_stays(places: FakePlaces) -> None:
    places.stops_after["model.safetensors"] = 2_000_000
    server = HttpServer(Api(FakeGenerator(), SETTINGS, RULES).app, "127.0.0.1", [0], shared=False)
    server.start()
    body = {"headers": BOSS, "json": {"model": "org/name"}, "timeout": 60}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
        async with client.stream("POST", "/api/pull", **body) as answer:
            async for line in answer.aiter_lines():
                if json.loads(line).get("completed", 0) > 1000:
                    break
        name = pulled_name("org/name")
        assert name is not None
        for _ in range(200):
            try:
                with PulledModels().pulling(name, waits=False):
                    break
            except InUse:
                await asyncio.sleep(0.05)
        else:
            pytest.fail("the pull goes on")
    await server.stop()
    assert [each.model.is_whole for each in PulledModels().cached()] == [False]


def reaching(monkeypatch: pytest.MonkeyPatch, hosts: dict[str, str], answer: Any) -> httpx.Client:
    def find(host: str, port: int, **_: Any) -> list[Any]:
        return [(0, 0, 0, "", (hosts[host], port))]

    monkeypatch.setattr("cluster.ingress.ollama.public_transport.socket.getaddrinfo", find)
    return make_client(PublicTransport(httpx.MockTransport(answer)))


def test_a_connection_goes_to_the_address_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.host, request.headers["host"], request.extensions["sni_hostname"]))
        return (
            httpx.Response(302, headers={"Location": "/b"})
            if request.url.path == "/a"
            else httpx.Response(200)
        )

    with reaching(monkeypatch, {"models.example": "93.184.215.14"}, answer) as client:
        assert client.get("https://models.example/a").url == "https://models.example/b"
    assert seen == [("93.184.215.14", "models.example", "models.example")] * 2


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "::ffff:127.0.0.1"])
def test_no_redirect_leads_inside(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(302, headers={"Location": "http://inside.example/a"})

    hosts = {"models.example": "93.184.215.14", "inside.example": address}
    with (
        reaching(monkeypatch, hosts, answer) as client,
        pytest.raises(ConfigError, match=r"'inside.example' has no"),
    ):
        client.get("https://models.example/a")
