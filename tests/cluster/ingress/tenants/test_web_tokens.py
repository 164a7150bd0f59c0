"""JSON Web Tokens, made by PyJWT as identity providers make them: whose are taken, and what they are good for."""

import base64
import hmac
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from pydantic import SecretStr

from cluster.ingress.tenants import web_tokens
from cluster.ingress.tenants.access import Rules, TenantRules
from cluster.ingress.tenants.web_tokens import WebTokens
from core.config.cluster_config import load
from core.config.jwt_config import JwtConfig
from core.errors import ConfigError, RequestError
from tests.cluster.ingress.api.fakes import FakeGenerator
from tests.cluster.ingress.api.harness import CLASSES, COMPLETIONS, OK, Api

jwt = pytest.importorskip("jwt")

ISSUER, AUDIENCE = "https://id.example.com", "baton"
RSA, OTHER = (rsa.generate_private_key(65537, 2048) for _ in range(2))
EC, ED = ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()
ALGORITHMS = {"RS256": RSA, "ES256": EC, "EdDSA": ED}


def public(algorithm: str, key: Any, kid: str) -> dict[str, Any]:
    made = jwt.algorithms.get_default_algorithms()[algorithm].to_jwk(key.public_key(), as_dict=True)
    return {**made, "kid": kid, "use": "sig", "alg": algorithm}


KEYS = {"keys": [public(algorithm, key, algorithm) for algorithm, key in ALGORITHMS.items()]}


def token(algorithm: str = "RS256", key: Any = None, kid: str = "", **claims: Any) -> str:
    usual = {"iss": ISSUER, "aud": AUDIENCE, "sub": "ann", "exp": time.time() + 60, "tenant": "acme"}
    found = {name: value for name, value in (usual | claims).items() if value is not None}
    signing = key if key is not None else ALGORITHMS[algorithm]
    return jwt.encode(found, signing, algorithm, headers={"kid": kid or algorithm})


@pytest.fixture
def config(tmp_path: Path) -> JwtConfig:
    (tmp_path / "keys.json").write_text(json.dumps(KEYS))
    return JwtConfig(
        issuer=ISSUER,
        audience=AUDIENCE,
        keys=str(tmp_path / "keys.json"),
        algorithms=("RS256", "ES256", "EdDSA"),
        class_claim="tier",
    )


def api(config: JwtConfig) -> Api:
    tenants = {"": TenantRules((SecretStr("root"),)), "acme": TenantRules()}
    return Api(FakeGenerator("hello"), rules=Rules(CLASSES, tenants, jwt=config))


def bearer(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


@pytest.mark.parametrize("algorithm", [*ALGORITHMS])
async def test_a_token_stands_for_its_tenant_and_class(config: JwtConfig, algorithm: str) -> None:
    made = api(config)
    assert (await made.post(COMPLETIONS, OK, **bearer(token(algorithm, tier="chat")))).status_code == 200
    (request,) = made.generator.requests
    assert (request.tenant, request.slo.name) == ("acme", "chat")
    body = {**OK, "service_tier": "standard"}
    assert (await made.post(COMPLETIONS, body, **bearer(token(algorithm, tier="chat")))).status_code == 200
    assert made.generator.requests[-1].slo.name == "standard"
    assert (await made.post(COMPLETIONS, OK, **bearer("root"))).status_code == 200, "keys stay"
    assert (await made.post(COMPLETIONS, OK)).status_code == 401


def forged() -> str:
    """Return a token that is signed by a shared secret: the public key, which everybody has."""
    secret = RSA.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    _, claims, _ = token().split(".")
    header = base64.urlsafe_b64encode(b'{"alg": "HS256", "kid": "RS256"}').rstrip(b"=").decode()
    signature = hmac.digest(secret, f"{header}.{claims}".encode(), "sha256")
    return f"{header}.{claims}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: token(exp=time.time() - 60), "expired"),
        (lambda: token(exp=None), "exp"),
        (lambda: token(nbf=time.time() + 60), "not yet valid"),
        (lambda: token(aud="another"), "Audience"),
        (lambda: token(aud=None), "aud"),
        (lambda: token(iss="https://id.example.com/"), "issuer"),
        (lambda: token(sub=None), "sub"),
        (lambda: token(key=OTHER), "verification failed"),
        (lambda: token(kid="ES256"), "alg"),
        (lambda: token(kid="nobodys"), "key is not among"),
        (lambda: token(key="x" * 64, algorithm="HS256", kid="RS256"), "alg"),
        (forged, "alg"),
        (lambda: jwt.encode({"sub": "x"}, None, "none", headers={"kid": "RS256"}), "alg"),
        (lambda: token()[:-6] + "AAAAAA", "verification failed"),
        (lambda: "a.b.c", "token is not taken"),
        (lambda: f"{'a' * 17_000}.b.c", "too long"),
        (lambda: token(tenant="nobody"), "names no tenant"),
        (lambda: token(tenant=None), "names no tenant"),
    ],
)
async def test_a_token_that_does_not_stand_is_refused_in_words(
    config: JwtConfig, wrong: Any, words: str
) -> None:
    answer = await api(config).post(COMPLETIONS, OK, **bearer(wrong()))
    assert answer.status_code == 401, answer.text
    assert words in answer.json()["error"]["message"]


async def test_scopes_open_what_they_name_and_a_tenants_token_is_for_inference_alone(
    config: JwtConfig,
) -> None:
    made = api(config)
    cases: tuple[tuple[dict[str, Any], int, int], ...] = (
        ({"tenant": None, "scope": "openid baton:metrics"}, 200, 403),
        ({"tenant": None, "scope": ["metrics"]}, 200, 403),
        ({"scope": "inference metrics"}, 403, 200),
        ({"scope": "openid"}, 403, 403),
    )
    for claims, metrics, completions in cases:
        headers = bearer(token(**claims))
        assert (await made.http.get("/metrics", headers=headers)).status_code == metrics
        assert (await made.post(COMPLETIONS, OK, **headers)).status_code == completions


class Issuer(httpx.AsyncBaseTransport):
    """What the URL of keys answers."""

    def __init__(self, keys: dict[str, Any]) -> None:
        self.keys, self.num_asked = keys, 0
        self.answer: httpx.Response | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.num_asked += 1
        return self.answer or answer(200, json.dumps(self.keys).encode())


def answer(status: int, content: bytes = b"", **headers: str) -> httpx.Response:
    return httpx.Response(status, headers=headers, stream=httpx.ByteStream(content))


async def test_keys_of_a_url_are_read_once_and_again_when_they_are_rotated(
    config: JwtConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer = Issuer({"keys": [public("RS256", RSA, "old")]})
    tokens = WebTokens(config.model_copy(update={"keys": "https://id.example.com/jwks"}), issuer)
    for _ in range(3):
        assert (await tokens.claims(token(kid="old"))).subject == "ann"
    assert issuer.num_asked == 1
    issuer.keys = {"keys": [public("RS256", OTHER, "new")]}
    with pytest.raises(RequestError, match="key is not among"):
        await tokens.claims(token(key=OTHER, kid="new"))
    assert issuer.num_asked == 1, "unknown keys do not have the issuer asked again and again"
    monkeypatch.setattr(web_tokens, "UNKNOWN_S", 0.0)
    assert (await tokens.claims(token(key=OTHER, kid="new"))).tenant == "acme"
    with pytest.raises(RequestError):
        await tokens.claims(token(kid="old"))


@pytest.mark.parametrize(
    "unusable",
    [
        answer(302, Location="http://169.254.169.254/"),
        answer(500),
        answer(200, b"no keys"),
        answer(200, b" " * (2 << 20)),
        answer(200, b'{"keys": []}'),
    ],
)
async def test_keys_that_cannot_be_read_leave_the_last_ones(
    config: JwtConfig, monkeypatch: pytest.MonkeyPatch, unusable: httpx.Response
) -> None:
    monkeypatch.setattr(web_tokens, "UNKNOWN_S", -1.0)
    issuer = Issuer({"keys": [public("RS256", RSA, "old")]})
    tokens = WebTokens(config.model_copy(update={"keys": "https://id.example.com/jwks"}), issuer)
    await tokens.claims(token(kid="old"))
    issuer.answer = unusable
    with pytest.raises(RequestError):
        await tokens.claims(token(kid="unknown"))
    assert issuer.num_asked == 2
    assert (await tokens.claims(token(kid="old"))).subject == "ann"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"issuer": ISSUER}, "set jwt.audience as well"),
        ({"issuer": ISSUER, "audience": "a"}, "set jwt.keys as well"),
        ({"issuer": ISSUER, "audience": "a", "keys": "http://id.example.com"}, "https URL"),
        ({"issuer": ISSUER, "audience": "a", "keys": "keys.json"}, "whole path"),
        ({"issuer": ISSUER, "audience": "a", "keys": "/k", "algorithms": ["HS256"]}, "algorithms"),
        ({"issuer": ISSUER, "audience": "a", "keys": "/k", "algorithms": ["none"]}, "algorithms"),
    ],
)
def test_tokens_that_could_not_be_checked_are_refused_at_the_start(
    values: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load({"jwt": values}, {})
    load({"jwt": {"issuer": ISSUER, "audience": "a", "keys": "/k"}, "tenants": {"acme": {}}}, {})
