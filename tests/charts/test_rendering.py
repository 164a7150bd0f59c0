"""Every example renders to objects that the Kubernetes API and KubeRay would take; values with a mistake do not render."""

import importlib
import subprocess
import sys

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.serve import Application

from cluster.deploy.serve_file import check_serve_file
from tests.charts.rendering import CHART, EXAMPLES, ROOT, example, of_kind, pods, render, serve_config
from tests.charts.schemas import check, check_pod


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_valid(name: str) -> None:
    objects = example(name)
    for made in objects:
        check(made)
        assert made["kind"].startswith("ClusterRole") or made["metadata"]["namespace"] == "llm"
    for template in pods(objects).values():
        check_pod(template)


def test_objects_have_names_of_their_own() -> None:
    objects = example("everything")
    names = [(made["kind"], made["metadata"]["name"]) for made in objects]
    assert len(set(names)) == len(names)
    assert max(len(name) for _, name in names) <= 63


def test_pools_that_follow_their_load_are_left_to_the_scheduler() -> None:
    content = serve_config(render({"config": {"scaling": {"enabled": True, "decode_max": 8}}}))
    _, configs = check_serve_file(content)
    assert content["applications"][0]["external_scaler_enabled"] is True
    assert [config.scaling.decode_max for config in configs.values()] == [8]
    assert "external_scaler_enabled" not in serve_config(render())["applications"][0]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_server_takes_the_configuration(name: str) -> None:
    """As `baton deploy` reads a Serve file: no key that Serve or the server does not know."""
    schema, configs = check_serve_file(serve_config(example(name)))
    assert len(configs) == len(schema.applications)
    assert {config.serve.host for config in configs.values()} == {"0.0.0.0"}


def test_the_builder_makes_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    [application] = serve_config(example("cpu"))["applications"]
    module, _, name = application["import_path"].partition(":")
    monkeypatch.setenv("BATON_CLUSTER_KEY", "from the Secret")
    built = getattr(importlib.import_module(module), name)(application["args"])
    assert isinstance(built, Application)


@pytest.mark.parametrize(
    "values",
    [
        {"config": {"engine": {"blocksize": 16}}},
        {"config": {"engine": {"block_size": 0}}},
        {"config": {"slo_classes": {"mine": {"ttft": 1}}}},
        {"prefil": {}},
        {"decode": {"gpuPerPod": 8}},
        {"head": {"gpusPerPod": 8}},
        {"models": {"qwen": {"config": {"modle": {}}}}},
        {"models": {"Qwen_3": {}}},
        {"config": {"models": {"code": {"paht": "embedded"}}}},
        {"config": {"models": {"code": 1}}},
        {"modelPods": {"code": {"decod": {}}}},
        {"kind": "RayServe"},
        {"networkPolicy": {"enabled": "yes"}},
    ],
)
def test_a_typo_fails(values: dict[str, object]) -> None:
    with pytest.raises(helm_python.HelmError, match=r"(?i)schema|additional|propert|value"):
        render(values)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"config": {"cluster_key": "hush"}}, "clusterKey.existingSecret"),
        ({"config": {"serve": {"api_keys": ["hush"]}}}, "apiKeys.existingSecret"),
        ({"config": {"tenants": {"a": {"keys": ["hush"]}}}}, "keys_file"),
        ({"config": {"serve": {"port": 0}}}, "serve.port"),
        ({"config": {"engine": {"num_blocks": 64}}}, "shmSize"),
        (
            {"expose": {"ingress": {"enabled": True, "host": "a.example"}}, "models": {"two": {}}},
            "a host of its own",
        ),
        ({"config": {"serve": {"tls_client_ca": "/ca"}}}, "kubelet"),
        ({"live": {"tenants": {"a": {"keys": ["hush"]}}}}, "keys_file"),
        ({"config": {"engine": {"device": "cuda"}}}, "gpusPerPod"),
        ({"config": {"decode": {"tp": 4, "pp": 4}}, "decode": {"gpusPerPod": 8}}, "16 ranks"),
        (
            {"config": {"decode": {"tp": 4, "pp": 4, "hosts": 2}}, "decode": {"gpusPerPod": 4}},
            "16 ranks, which need a GPU each in 2 pods, but decode.gpusPerPod is 4",
        ),
        ({"controller": {"scale": True}, "autoscaling": {"enabled": True}}, "choose one"),
        ({"networkPolicy": {"enabled": False, "egress": {"enabled": True}}}, "needs networkPolicy.enabled"),
        ({"apiKeys": {"enabled": False, "existingSecret": "keys"}}, "Set apiKeys.enabled"),
        ({"decode": {"minReplicas": 3, "maxReplicas": 2}}, "minReplicas is 3 and maxReplicas 2"),
        ({"ingress": {"minReplicas": 3, "maxReplicas": 2}}, "minReplicas is 3 and maxReplicas 2"),
    ],
)
def test_what_cannot_be_right_is_refused(values: dict[str, object], why: str) -> None:
    with pytest.raises(helm_python.HelmError, match=why):
        render(values)


def test_helm_has_nothing_to_say_against_it() -> None:
    found = helm_python.lint(str(CHART))
    assert found["errors"] == []


def test_what_is_generated_is_current() -> None:
    code = "import schema, sys; sys.exit(any(p.read_text() != text for p, text in schema.made().items()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "charts", check=False, timeout=60)
    assert done.returncode == 0, "run: make chart-schema"


def test_the_values_file_shows_the_defaults() -> None:
    code = (
        "import schema, sys, yaml; given = yaml.safe_load(open('baton/values.yaml'));"
        "sys.exit(schema.ChartValues.model_validate(given) != schema.ChartValues())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "charts", check=False, timeout=60)
    assert done.returncode == 0


def test_the_checks_can_fail() -> None:
    service = of_kind(render(), "RayService")["demo-baton"]
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["numHosts"] = 2
    with pytest.raises(jsonschema.ValidationError, match="numHosts"):
        check(service)
    endpoint = of_kind(render(), "Service")["demo-baton"]
    endpoint["spec"]["port"] = 80
    with pytest.raises(kubernetes_validate.ValidationError, match="port"):
        check(endpoint)
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        check({"apiVersion": "v1", "kind": "Servise", "metadata": {}})


def test_yaml_of_the_serve_configuration_is_read_once() -> None:
    """Numbers stay numbers: Helm's are floats, and a KV pool of 64 GiB must not become 6.8e+10."""
    objects = render({"config": {"engine": {"kv_bytes": 68719476736}}})
    [application] = yaml.safe_load(of_kind(objects, "RayService")["demo-baton"]["spec"]["serveConfigV2"])[
        "applications"
    ]
    assert application["args"]["engine"]["kv_bytes"] == 68719476736
