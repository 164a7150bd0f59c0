"""Each alert rule fires on what it is for, and none on a healthy cluster, by promtool's own evaluation."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.cluster_process import ROOT

ALERTS = ROOT / "charts" / "baton" / "files" / "alerts.yaml"
AT = "40m"

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs Debian's prometheus (.ci/apt.txt)"
)

HEALTHY = {
    'baton_pool_wanted_instances{pool="decode"}': "2x60",
    'baton_pool_serving_instances{pool="decode"}': "2x60",
    "baton_scheduler_up": "1x60",
    "baton_accepting": "1x60",
    'baton_instance_defective{address="d0"}': "0x60",
    'baton_instance_leaving{address="d0"}': "0x60",
    'baton_instance_kv_usage_ratio{address="d0",role="decode"}': "0.6x60",
    "baton_requests_failed_total": "0x60",
    "baton_requests_finished_total": "0+600x60",
    'baton_slo_requests_total{slo_class="chat",attained="true"}': "0+590x60",
    'baton_slo_requests_total{slo_class="chat",attained="false"}': "0+10x60",
    "baton_requests_rejected_total": "0x60",
    'baton_placement_wait_seconds_bucket{le="5"}': "0+600x60",
    'baton_placement_wait_seconds_bucket{le="+Inf"}': "0+600x60",
    'baton_kv_transfer_exposed_seconds_bucket{le="0.2"}': "0+600x60",
    'baton_kv_transfer_exposed_seconds_bucket{le="+Inf"}': "0+600x60",
    'baton_instance_preemptions_total{address="d0"}': "0x60",
    'baton_instance_fences_total{address="d0"}': "0x60",
    "baton_attempts_lost_total": "0x60",
    "baton_instances_hung_total": "0x60",
    'baton_rule_changes_total{outcome="taken"}': "0+1x60",
    'baton_rule_changes_total{outcome="refused"}': "0x60",
}
TROUBLE = {
    "BatonDown": {"baton_scheduler_up": "_x60"},
    "BatonSchedulerUnreachable": {"baton_scheduler_up": "0x60"},
    "BatonNotAccepting": {"baton_accepting": "0x60"},
    "BatonInstancesMissing": {'baton_pool_serving_instances{pool="decode"}': "2x10 1x50"},
    "BatonBlockAccountingBroken": {'baton_instance_defective{address="d0"}': "1x60"},
    "BatonFailures": {"baton_requests_failed_total": "0+20x60"},
    "BatonAttainmentLow": {'baton_slo_requests_total{slo_class="chat",attained="false"}': "0+200x60"},
    "BatonRefusingForLoad": {"baton_requests_rejected_total": "0+60x60"},
    "BatonPlacementSlow": {
        'baton_placement_wait_seconds_bucket{le="5"}': "0+500x60",
        'baton_placement_wait_seconds_bucket{le="60"}': "0+600x60",
    },
    "BatonKvNearlyFull": {'baton_instance_kv_usage_ratio{address="d0",role="decode"}': "0.99x60"},
    "BatonPreempting": {'baton_instance_preemptions_total{address="d0"}': "0+30x60"},
    "BatonTransferExposed": {
        'baton_kv_transfer_exposed_seconds_bucket{le="0.2"}': "0+500x60",
        'baton_kv_transfer_exposed_seconds_bucket{le="2"}': "0+600x60",
    },
    "BatonInstancesLost": {"baton_attempts_lost_total": "0+5x60"},
    "BatonInstanceHung": {"baton_instances_hung_total": "0x35 1x25"},
    "BatonFencing": {'baton_instance_fences_total{address="d0"}': "0+1x60"},
    "BatonLiveConfigRefused": {'baton_rule_changes_total{outcome="refused"}': "0x35 1x25"},
    "BatonDrainStuck": {'baton_instance_leaving{address="d0"}': "1x60"},
}


def test_every_rule_is_tried() -> None:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    assert [rule["alert"] for rule in group["rules"]] == list(TROUBLE)


@pytest.mark.parametrize("expected", ["", *TROUBLE])
def test_it_fires_alone(expected: str, tmp_path: Path) -> None:
    firing = fired(HEALTHY | TROUBLE.get(expected, {}), tmp_path)
    assert {alert for alert in TROUBLE if f"alertname: {alert}," in firing} == (
        {expected} if expected else set()
    ), firing


def test_a_model_that_fails_is_not_hidden_by_one_with_more_requests(tmp_path: Path) -> None:
    series = {_of_model(name, "large"): values for name, values in HEALTHY.items()}
    small = {"baton_requests_failed_total": "0+5x60", "baton_requests_finished_total": "0x60"}
    firing = fired(series | {_of_model(name, "small"): values for name, values in small.items()}, tmp_path)
    assert "alertname: BatonFailures" in firing, firing
    assert 'model="small"' in firing, firing
    assert 'model="large"' not in firing, firing


def _of_model(series: str, model: str) -> str:
    """The series of one model of several."""
    name, _, labels = series.rstrip("}").partition("{")
    return f'{name}{{model="{model}"{"," if labels else ""}{labels}}}'


def fired(series: dict[str, str], tmp_path: Path) -> str:
    """What promtool says of each rule that fires."""
    case: dict[str, Any] = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": AT, "alertname": alert, "exp_alerts": []} for alert in TROUBLE],
    }
    file = tmp_path / "case.yaml"
    file.write_text(
        yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [case]})
    )
    done = subprocess.run(
        ["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout + done.stderr
