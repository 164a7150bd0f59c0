"""The strict reading of Serve's YAML: what is misspelt anywhere is named before anything is sent."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.deploy.serve_file import check_serve_file
from core.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = yaml.safe_load((EXAMPLES / "serve" / "baton.yaml").read_text())


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.glob("**/serve*/*.yaml")) + sorted(EXAMPLES.glob("*/app*.yaml")), ids=str
)
def test_every_example_is_accepted(path: Path) -> None:
    schema, configs = check_serve_file(yaml.safe_load(path.read_text()))
    assert [app.name for app in schema.applications] == list(configs)


def changed(path: str, value: Any) -> dict[str, Any]:
    """The example with `value` at a dotted path."""
    content: Any = copy.deepcopy(EXAMPLE)
    target = content
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in parents:
        target = target[part]
    target[last] = value
    return content


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("aplications", [], "aplications"),
        ("applications.0.arg", {}, "applications.0.arg"),
        ("applications.0.deployments.0.num_replica", 3, "deployments.0.num_replica"),
        ("applications.0.deployments.0.ray_actor_options.num_gpu", 1, "ray_actor_options.num_gpu"),
        ("applications.0.deployments.0.num_replicas", -1, "num_replicas"),
        ("applications.0.args.prefil_instances", 1, "prefil_instances"),
        ("applications.0.args.serve.prot", 1, "serve.prot"),
        ("applications.0.import_path", "cluster.deploy.serve_app.build", "cluster.deploy.serve_app:build"),
        ("proxy_location", "EveryNode", "proxy_location"),
        ("applications.0.deployments.0.name", "DecodePol", "DecodePol"),
        ("applications.0.deployments", [{"name": "Scheduler", "num_replicas": 3}], "serve.schedulers 1"),
        ("applications.0.args.scaling", {"enabled": True}, "needs external_scaler_enabled: true"),
    ],
)
def test_a_mistake_is_named(path: str, value: Any, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_serve_file(changed(path, value))
    assert named in str(refused.value)


def test_a_secret_is_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        check_serve_file(changed("applications.0.args.cluster_key", 123454321))
    assert "cluster_key" in str(refused.value)
    assert "123454321" not in str(refused.value)
