"""What each key is for, route by route, and that docs/security.md says the same of every route that there is."""

import re
from pathlib import Path

import pytest
from pydantic import SecretStr

from cluster.ingress.tenants.access import Rules, TenantRules, read_rules
from core.config.cluster_config import load
from core.errors import ConfigError
from tests.cluster.ingress.api.fakes import FakeGenerator
from tests.cluster.ingress.api.harness import CLASSES, SETTINGS, Api
from tests.e2e.cluster_process import ROOT

ROW = re.compile(r"^\| `?(none|inference|metrics|operator)`? \| (`/.*?`) \|", re.MULTILINE)
DOCUMENTED = {
    scope: re.findall(r"`([^`]+)`", paths)
    for scope, paths in ROW.findall((ROOT / "docs/security.md").read_text())
}
KEYS = {
    "whole": {"inference", "metrics", "operator"},
    "sk-prometheus": {"metrics"},
    "sk-app": {"inference"},
    "sk-ops": {"metrics", "operator"},
    "sk-tenant": {"inference"},
    "sk-tenant-2": {"inference"},
}


def api(folder: Path) -> Api:
    file = folder / "keys"
    file.write_text("# keys\nsk-app  inference\nsk-ops metrics,operator\n")
    serve = {"api_keys": ["whole", "sk-prometheus metrics"], "api_keys_file": str(file)}
    tenants = {"acme": {"keys": ["sk-tenant", "sk-tenant-2 inference"]}}
    rules = read_rules(load({"serve": serve, "tenants": tenants}, {}))
    return Api(FakeGenerator(), SETTINGS, rules)


def scopes_of(path: str) -> list[str]:
    """Return the scopes that the page gives a route: of the longest path that it names."""
    plain = re.sub(r"/\{.*", "", path)
    found = {
        named: scope
        for scope, paths in DOCUMENTED.items()
        for named in paths
        if plain == named or (named != "/" and plain.startswith(named + "/"))
    }
    return [found[named] for named in found if len(named) == max(map(len, found))]


def test_the_page_names_each_route_once_and_no_other(tmp_path: Path) -> None:
    routes = {getattr(route, "path", "") for route in api(tmp_path).app.routes}
    assert {path: scopes_of(path) for path in routes if len(scopes_of(path)) != 1} == {}
    named = [path for paths in DOCUMENTED.values() for path in paths]
    assert sorted(set(named)) == sorted(named)
    assert set(named) <= {re.sub(r"/\{.*", "", path) or "/" for path in routes}


@pytest.mark.parametrize("key", KEYS)
async def test_a_key_opens_the_routes_of_its_scopes_and_no_other(key: str, tmp_path: Path) -> None:
    made = api(tmp_path)
    for route in made.app.routes:
        path = re.sub(r"\{[^}]*\}", "x", getattr(route, "path", ""))
        (needed,) = scopes_of(path)
        for method in getattr(route, "methods", ()):
            answer = await made.http.request(method, path, headers={"Authorization": f"Bearer {key}"})
            if needed == "none" or needed in KEYS[key]:
                assert answer.status_code != 403 or "are those of the configuration" in answer.text, (
                    method,
                    path,
                )
            else:
                assert answer.status_code == 403, (method, path)


async def test_a_refusal_says_what_would_do(tmp_path: Path) -> None:
    refused = await api(tmp_path).http.get("/metrics", headers={"Authorization": "Bearer sk-tenant"})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (403, "insufficient_scope")
    assert "the scope metrics; this one has inference" in error["message"]
    assert "sk-" not in error["message"]


async def test_nothing_is_remembered_of_strangers(tmp_path: Path) -> None:
    """Neither wrong keys nor what they send become labels of metrics, which would stay for good."""
    made = api(tmp_path)

    async def names() -> set[str]:
        text = (await made.http.get("/metrics", headers={"Authorization": "Bearer sk-prometheus"})).text
        return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}

    async def stranger(number: int) -> None:
        headers = {
            "Authorization": f"Bearer wrong-{number}",
            "x-request-id": f"r-{number}",
            "user-agent": f"{number}",
        }
        assert (await made.http.get(f"/v1/models/{number}", headers=headers)).status_code == 401
        assert (await made.http.get(f"/path-{number}", headers=headers)).status_code == 404

    await stranger(0)
    await names()
    before = await names()
    for number in range(300):
        await stranger(number)
    assert await names() == before


async def test_without_keys_everybody_has_all_scopes() -> None:
    made = Api(FakeGenerator())
    assert (await made.http.get("/metrics")).status_code == 200
    assert (await made.http.post("/flush_cache")).status_code == 200


async def test_a_key_that_is_written_twice_has_the_scopes_of_both() -> None:
    keys = (SecretStr("k inference"), SecretStr("k metrics"))
    made = Api(FakeGenerator(), SETTINGS, Rules(CLASSES, {"": TenantRules(keys)}))
    for path, status in (("/v1/models", 200), ("/metrics", 200), ("/flush_cache", 403)):
        method = "POST" if path == "/flush_cache" else "GET"
        answer = await made.http.request(method, path, headers={"x-api-key": "k"})
        assert answer.status_code == status


@pytest.mark.parametrize(
    ("serve", "tenant", "said"),
    [
        (
            ["k metric"],
            [],
            "serve.api_keys: 'metric' is no scope of such a key; there are: inference, metrics, op",
        ),
        (["k open"], [], "'open' is no scope"),
        (["k metrics inference"], [], "printable ASCII without spaces"),
        ([""], [], "printable ASCII"),
        ([], ["k metrics"], "tenants.acme.keys: 'metrics' is no scope of such a key; there are: inference"),
        (["k metrics"], ["k"], "share a key"),
    ],
)
def test_a_mistake_is_named_without_the_key(serve: list[str], tenant: list[str], said: str) -> None:
    config = load({"serve": {"api_keys": serve}, "tenants": {"acme": {"keys": tenant or ["other"]}}}, {})
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_rules(config)
