"""What crosses hosts unencrypted is named once at the start, or refused."""

from typing import Any

import pytest

from cluster.deploy.serve_app import build_application
from core.config.cluster_config import load
from core.errors import ConfigError

ENCRYPTED = {"serve.tls_cert": "cert", "serve.tls_key": "key"}
WAYS: list[tuple[dict[str, Any], str]] = [
    ({"security.tls": "off"}, "mail, KV and plans"),
    ({"transfer.transport": "nixl"}, "KV by nixl"),
    ({"transfer.transport": "nccl", "engine.device": "cuda"}, "KV by nccl"),
    ({"decode.pp": 2, "decode.hosts": 2}, "set decode.hosts to 1"),
    ({"prefill.pp": 2, "prefill.hosts": 2}, "set prefill.hosts to 1"),
    ({"serve.host": "0.0.0.0", "serve.tls_cert": "", "serve.tls_key": ""}, "HTTP"),
]


def build(settings: dict[str, Any], *, one_host: bool = False) -> None:
    build_application(load({}, {}, ENCRYPTED | settings), b"key", one_host=one_host)


@pytest.fixture
def ray_encrypts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")


@pytest.mark.usefixtures("ray_encrypts")
@pytest.mark.parametrize(("settings", "what"), WAYS)
def test_it_is_named_and_strict_refuses_it(
    settings: dict[str, Any], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    build(settings)
    assert [what in record.message for record in caplog.records] == [True]
    if "security.tls" not in settings:  # the configuration alone refuses that
        with pytest.raises(ConfigError, match=what):
            build(settings | {"security.strict": True})


def test_rays_own_connections_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RAY_USE_TLS", raising=False)
    build({})
    assert "RAY_USE_TLS" in caplog.text
    with pytest.raises(ConfigError, match="RAY_USE_TLS"):
        build({"security.strict": True})


@pytest.mark.usefixtures("ray_encrypts")
def test_nothing_is_named_where_all_is_encrypted(caplog: pytest.LogCaptureFixture) -> None:
    for host in ("0.0.0.0", "::1", "127.0.0.1", "localhost"):
        build({"serve.host": host, "security.strict": True})
    build({"serve.host": "[::1]", "serve.tls_cert": "", "serve.tls_key": "", "security.strict": True})
    assert not caplog.records


@pytest.mark.parametrize(("settings", "_"), WAYS)
def test_nothing_leaves_a_single_host(
    settings: dict[str, Any], _: str, caplog: pytest.LogCaptureFixture
) -> None:
    build(settings, one_host=True)
    assert not caplog.records
