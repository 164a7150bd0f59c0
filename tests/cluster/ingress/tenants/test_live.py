"""Service classes, tenants and keys change under a running server; what is not valid changes nothing."""

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.ingress.tenants import live_rules
from cluster.ingress.tenants.live_rules import LiveRules
from core.config.cluster_config import ClusterConfig, load
from core.errors import ConfigError
from tests.e2e.cluster_process import serving
from tests.patience import until


def write(path: Path, content: Any) -> None:
    """As an orchestrator does: the new file takes the old one's place at once."""
    fresh = path.with_suffix(".new")
    fresh.write_text(content if isinstance(content, str) else json.dumps(content))
    os.replace(fresh, path)


def config(tmp_path: Path, **serve: Any) -> ClusterConfig:
    settings = {"live_file": str(tmp_path / "live.yaml"), "api_keys": ["base"], **serve}
    return load({"serve": settings, "tenants": {"fixed": {"keys": ["k-fixed"]}}}, {})


def holds(rules: LiveRules, key: str) -> bool:
    try:
        rules.access.holder_of(f"Bearer {key}")
    except Exception:
        return False
    return True


async def test_a_file_that_changes_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_rules, "PERIOD_S", 0.02)
    file, keys = tmp_path / "live.yaml", tmp_path / "keys"
    keys.write_text("k-old\n")
    write(file, {"tenants": {"acme": {"keys_file": str(keys)}}})
    read = live_rules.read_rules

    def read_and_change(current: ClusterConfig) -> Any:
        rules = read(current)
        write(keys, "k-new\n")
        monkeypatch.setattr(live_rules, "read_rules", read)
        return rules

    monkeypatch.setattr(live_rules, "read_rules", read_and_change)
    rules = LiveRules(config(tmp_path))
    assert holds(rules, "k-old")
    watching = asyncio.create_task(rules.run(lambda _: None))
    await until(lambda: holds(rules, "k-new"))
    watching.cancel()


async def test_changes_are_taken_over_and_mistakes_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live_rules, "PERIOD_S", 0.02)
    caplog.set_level(logging.INFO, "cluster.ingress.tenants.live_rules")
    file, keys = tmp_path / "live.yaml", tmp_path / "keys"
    keys.write_text("k-file\n")
    write(file, {"tenants": {"acme": {"keys": ["k-1"], "keys_file": str(keys)}}})
    outcomes: list[str] = []
    rules = LiveRules(config(tmp_path))
    watching = asyncio.create_task(rules.run(outcomes.append))
    assert [key for key in ("base", "k-fixed", "k-1", "k-file", "k-2") if holds(rules, key)] == [
        "base",
        "k-fixed",
        "k-1",
        "k-file",
    ]
    write(
        file,
        {"tenants": {"acme": {"keys": ["k-2"]}}, "slo_classes": {"gold": {"ttft_s": 0.1, "tpot_s": 0.01}}},
    )
    await until(lambda: holds(rules, "k-2"))
    assert not holds(rules, "k-1")
    assert holds(rules, "k-fixed")
    gold = rules.access.slo(rules.access.holder_of("Bearer k-2").tenant, "gold", None)
    assert (gold.name, gold.ttft_s) == ("gold", 0.1)
    bad: list[tuple[Any, str]] = [
        ({"tenants": {"acme": {"keys": ["k-3"]}, "other": {"keys": ["k-3"]}}}, "share a key"),
        (
            {"tenants": {"acme": {"keys": ["k-3"], "max_request_per_min": 1}}},
            "tenants.acme.max_request_per_min",
        ),
        (
            {"tenants": {"acme": {"keys": ["k-3"]}}, "slo_classes": {"chat": {"ttft": 1}}},
            "chat.ttft is unknown",
        ),
        (
            {"tenants": {"acme": {"keys": ["k-3"]}}, "slo_classes": {"chat": {"ttft_s": 0}}},
            "chat.ttft_s must be",
        ),
        ({"tenants": {"acme": {"keys": ["k-3"]}}, "engine": {"block_size": 8}}, "'engine' cannot change"),
        ("tenants: [", "is not YAML"),
    ]
    for number, (content, message) in enumerate(bad, start=1):
        write(file, content)
        await until(lambda: sum("is refused" in r.getMessage() for r in caplog.records) == number)  # noqa: B023
        assert message in caplog.records[-1].getMessage()
        assert holds(rules, "k-2")
        assert not holds(rules, "k-3")
    file.unlink()
    await until(lambda: "cannot read" in caplog.records[-1].getMessage())
    assert holds(rules, "k-2")
    write(file, {"tenants": {"acme": {"keys": ["k-4"]}}})
    await until(lambda: holds(rules, "k-4"))
    assert not any("k-" in record.getMessage().replace("key", "") for record in caplog.records), (
        "no key is logged"
    )
    assert outcomes == ["taken", *["refused"] * (len(bad) + 1), "taken"]
    watching.cancel()


async def test_a_change_never_opens_the_server_to_everybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live_rules, "PERIOD_S", 0.02)
    file = tmp_path / "live.yaml"
    write(file, {"tenants": {"acme": {"keys": ["k-1"]}}})
    outcomes: list[str] = []
    rules = LiveRules(load({"serve": {"live_file": str(file)}}, {}))
    watching = asyncio.create_task(rules.run(outcomes.append))
    write(file, {})
    await until(lambda: any("everybody let in" in record.getMessage() for record in caplog.records))
    assert not holds(rules, "")
    assert holds(rules, "k-1")
    watching.cancel()


async def test_a_file_of_keys_is_watched_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_rules, "PERIOD_S", 0.02)
    keys = tmp_path / "keys"
    write(keys, "old\n")
    outcomes: list[str] = []
    rules = LiveRules(config(tmp_path, live_file="", api_keys_file=str(keys)))
    watching = asyncio.create_task(rules.run(outcomes.append))
    write(keys, "new\n")
    await until(lambda: holds(rules, "new"))
    assert not holds(rules, "old")
    assert holds(rules, "base")
    watching.cancel()


def test_it_must_be_there_and_valid_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"serve.live_file: cannot read"):
        LiveRules(config(tmp_path))
    write(tmp_path / "live.yaml", {"model": {}})
    with pytest.raises(ConfigError, match="'model' cannot change"):
        LiveRules(config(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_running_server_takes_new_limits_and_classes(tmp_path: Path) -> None:
    file = tmp_path / "live.yaml"
    write(file, {"tenants": {"acme": {"keys": ["k-acme"]}}})
    with serving(
        "--local", "--prefill", "0", "--set", f"serve.live_file={file}", log=tmp_path / "log"
    ) as server:

        def ask(tier: str) -> httpx.Response:
            body = {"model": "baton-embedded", "prompt": "x", "max_tokens": 1, "service_tier": tier}
            headers = {"Authorization": "Bearer k-acme"}
            return httpx.post(f"{server.base_url}/v1/completions", json=body, headers=headers, timeout=30)

        assert [ask("auto").status_code, ask("gold").status_code] == [200, 400]
        limits = {"keys": ["k-acme"], "max_requests_per_min": 1}
        write(file, {"tenants": {"acme": limits}, "slo_classes": {"gold": {"ttft_s": 1, "tpot_s": 1}}})
        log = tmp_path / "log"
        asyncio.run(until(lambda: "new live configuration" in log.read_text()))
        assert [ask("gold").status_code, ask("gold").status_code] == [200, 429]
        write(file, "nonsense: 1")
        asyncio.run(
            until(lambda: "is refused, the old one holds: 'nonsense' cannot change" in log.read_text())
        )
        assert ask("gold").status_code == 429
