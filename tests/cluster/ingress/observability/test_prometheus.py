"""Debian's Prometheus scrapes a server under load: every query of the dashboard and of the alert rules has data."""

import json
import math
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.cluster.ingress.observability.conftest import METRICS_KEY, headers, load
from tests.e2e.cluster_process import ROOT, ServeProcess
from tests.patience import PATIENCE_S
from tests.ports import free_port

FILES = ROOT / "charts" / "baton" / "files"
ALERTS = FILES / "alerts.yaml"
SCRAPES = 8

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's prometheus (.ci/apt.txt)"),
]

VLLM_DASHBOARD = [
    # What the dashboards that come with vLLM ask for.
    *("vllm:num_requests_running", "vllm:num_requests_waiting"),
    *("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:num_preemptions_total"),
    *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    *("vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket"),
    *("vllm:time_per_output_token_seconds_bucket", "vllm:request_time_per_output_token_seconds_bucket"),
    *("vllm:e2e_request_latency_seconds_bucket", "vllm:request_queue_time_seconds_sum"),
    *("vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum"),
    *("vllm:request_inference_time_seconds_sum", "vllm:request_max_num_generation_tokens_sum"),
    *("vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket"),
    *("vllm:request_params_n_bucket", "vllm:request_params_max_tokens_bucket"),
    'vllm:request_success_total{finished_reason="length"}',
]


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **params: str) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=params, timeout=PATIENCE_S)
        answer.raise_for_status()
        return answer.json()["data"]

    def values(self, query: str) -> list[float]:
        return [float(one["value"][1]) for one in self.get("query", query=query)["result"]]

    def has_data(self, query: str) -> bool:
        """Soon: where the scheduler did not answer in time a scrape has nothing of the instances in it."""
        deadline = time.monotonic() + PATIENCE_S
        while not any(math.isfinite(value) for value in self.values(query)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.5)
        return True


@pytest.fixture(scope="module")
def prometheus(server: ServeProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    target = {
        "job_name": "baton",
        "authorization": {"credentials": METRICS_KEY},
        "static_configs": [{"targets": [f"127.0.0.1:{server.port}"]}],
    }
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [target],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        found = Prometheus(f"http://127.0.0.1:{port}")
        with load(server) as num_asked:
            _wait_for_scrapes(found, process, folder / "log", num_asked)
            yield found
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def _wait_for_scrapes(
    prometheus: Prometheus, process: "subprocess.Popen[bytes]", log: Path, num_asked: Callable[[], int]
) -> None:
    deadline = time.monotonic() + 2 * PATIENCE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            if (
                num_asked() > 4
                and prometheus.values('count_over_time(baton_slo_requests_total{attained="true"}[1m])')
                and min(
                    prometheus.values('count_over_time(baton_requests_finished_total{reason="length"}[1m])')
                )
                >= SCRAPES
            ):
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"not scraped: {prometheus.get('targets')}")


def _targets() -> list[tuple[str, str]]:
    board = json.loads((FILES / "dashboards" / "baton.json").read_text())
    return [
        (f"{panel['title']}: {target['legendFormat']}", target["expr"])
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]


def _rules() -> list[tuple[str, str]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return [(rule["alert"], rule["expr"]) for rule in group["rules"]]


@pytest.mark.parametrize(("where", "query"), _targets(), ids=[where for where, _ in _targets()])
def test_a_panels_query_has_data(prometheus: Prometheus, where: str, query: str) -> None:
    everything = re.sub(r"\$(job|model|row)\b", ".*", query)
    assert prometheus.has_data(everything.replace("$__rate_interval", "1m"))


@pytest.mark.parametrize(("alert", "query"), _rules(), ids=[alert for alert, _ in _rules()])
def test_what_an_alert_compares_has_data(prometheus: Prometheus, alert: str, query: str) -> None:
    measured, _, limit = re.split(r" ([<>]) (?=[\d.]+$)", query)
    assert float(limit) >= 0
    assert prometheus.has_data(measured)


def test_rules_are_evaluated_and_none_fires(prometheus: Prometheus) -> None:
    (group,) = prometheus.get("rules")["groups"]
    assert [(rule["name"], rule["health"], rule.get("lastError")) for rule in group["rules"]] == [
        (name, "ok", None) for name, _ in _rules()
    ]
    firing = [
        alert["labels"]["alertname"]
        for alert in prometheus.get("alerts")["alerts"]
        if alert["state"] == "firing"
    ]
    assert not firing


@pytest.mark.parametrize("name", VLLM_DASHBOARD)
def test_vllms_names_have_data(prometheus: Prometheus, name: str) -> None:
    selector = (
        name.replace("{", '{model_name="baton-embedded",')
        if "{" in name
        else f'{name}{{model_name="baton-embedded"}}'
    )
    assert prometheus.has_data(selector)


def test_figures_are_what_happened(prometheus: Prometheus) -> None:
    by_role = [
        prometheus.values(f'last_over_time(baton_instances{{role="{role}"}}[30s])')
        for role in ("prefill", "decode", "both")
    ]
    assert by_role == [[1.0], [2.0], [0.0]]
    assert prometheus.values("sum(last_over_time(baton_kv_transfers_total[30s]))")[0] > 0
    # Instances report their counts now and then, while the ingress counts a transfer at once.
    assert prometheus.values("sum(last_over_time(baton_instance_grants_total[30s]))") >= prometheus.values(
        "sum(last_over_time(baton_kv_transfers_total[30s] offset 5s))"
    )
    assert prometheus.values("sum(last_over_time(baton_instance_prefix_hit_tokens_total[30s]))")[0] > 0
    assert (
        prometheus.values(
            'sum(last_over_time(baton_requests_refused_total{tenant="small",reason="rate_limit_exceeded"}[30s]))'
        )[0]
        > 0
    )
    ours, theirs = "baton_output_tokens_total", "vllm:generation_tokens_total"
    missing = f"sum(last_over_time({ours}[30s])) - sum(last_over_time({theirs}[30s]))"
    assert prometheus.values(missing) == [0.0]


def test_promtool_finds_nothing_to_complain_of(server: ServeProcess) -> None:
    subprocess.run(["promtool", "check", "rules", str(ALERTS)], check=True, capture_output=True)
    text = httpx.get(f"{server.base_url}/metrics", headers=headers(METRICS_KEY), timeout=PATIENCE_S).text
    ours = "".join(line + "\n" for line in text.splitlines() if "vllm:" not in line)
    found = subprocess.run(
        ["promtool", "check", "metrics"], input=ours, text=True, capture_output=True, check=False
    )
    assert (found.stdout, found.stderr) == ("", "")
