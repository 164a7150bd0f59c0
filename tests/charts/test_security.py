"""Who may do and read what in the rendered cluster: rights, networks, secrets, TLS."""

import base64
import json
from typing import Any

import helm_python
import pytest

from cluster.deploy.kube.controller import parser
from cluster.deploy.kube.topology import LABELS, OWN, label_names, read_site
from core.config.cluster_config import load
from tests.charts.rendering import (
    EXAMPLES,
    Object,
    all_pods,
    cluster_spec,
    container,
    example,
    of_kind,
    pods,
    render,
    serve_config,
)
from tests.charts.schemas import check, check_pod


@pytest.mark.parametrize("name", EXAMPLES)
def test_nothing_runs_as_root(name: str) -> None:
    objects = example(name)
    for template in all_pods(objects):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
        for one in [*spec["containers"], *spec.get("initContainers", [])]:
            assert one["securityContext"]["allowPrivilegeEscalation"] is False
            assert "privileged" not in one["securityContext"]


def test_the_container_that_kuberay_adds_for_scaling_has_no_rights_either() -> None:
    options = cluster_spec(example("everything"))["autoscalerOptions"]
    assert options["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


def allows(policy: Object, port: str) -> list[Any] | None:
    """Return what may reach `port` by this policy: peers, an empty list for everything, None for nothing."""
    peers: list[Any] | None = None
    for rule in policy["spec"]["ingress"]:
        if "ports" not in rule or port in {one["port"] for one in rule["ports"]}:
            if "from" not in rule:
                return []
            peers = [*(peers or []), *rule["from"]]
    return peers


def test_control_plane_and_kv_are_closed_to_the_outside() -> None:
    policies = of_kind(render(), "NetworkPolicy")
    own = {
        "podSelector": {
            "matchLabels": {"app.kubernetes.io/name": "baton", "app.kubernetes.io/instance": "demo"}
        }
    }
    whole, dashboard, api = (
        policies[name] for name in ("demo-baton", "demo-baton-dashboard", "demo-baton-api")
    )
    assert whole["spec"]["podSelector"] == own["podSelector"], "every pod of the release"
    for port in ("gcs-server", "dashboard", "client", "http", "any port of mail or KV"):
        assert allows(whole, port) == [own]
    [operator] = allows(dashboard, "dashboard") or []
    assert operator["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "kuberay-operator"}
    assert dashboard["spec"]["podSelector"]["matchLabels"]["baton/role"] == "head"
    assert allows(dashboard, "gcs-server") is None
    assert api["spec"]["podSelector"]["matchLabels"]["baton/role"] == "ingress"
    assert allows(api, "http") == []
    assert allows(api, "metrics") is None
    assert all(policy["spec"]["policyTypes"] == ["Ingress"] for policy in policies.values())


def test_the_api_can_be_closed_but_to_a_gateway() -> None:
    api = of_kind(example("gateway"), "NetworkPolicy")["demo-baton-api"]
    peers = allows(api, "http")
    assert peers
    assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateways"}}} in peers
    assert len(peers) == 2, "and Prometheus"


def test_secrets_are_made_once_or_taken_from_elsewhere() -> None:
    made = of_kind(render(), "Secret")
    assert set(made) == {"demo-baton-api-keys", "demo-baton-cluster-key", "demo-baton-ray-token"}
    assert all(one["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for one in made.values())
    objects = example("existing-secrets")
    assert of_kind(objects, "Secret") == {}
    decode, ingress = (json.dumps(pods(objects)[name]) for name in ("decode", "ingress"))
    assert all(f'"{name}"' in decode for name in ("llm-cluster-key", "llm-cluster-tls", "hf-token"))
    assert all(
        f'"{name}"' in ingress for name in ("llm-cluster-key", "llm-api-keys", "llm-tls", "llm-cluster-tls")
    )
    assert "llm-api-keys" not in decode, "only who needs a secret has it"
    assert cluster_spec(objects)["authOptions"] == {"mode": "token", "secretName": "llm-ray-token"}
    [application] = serve_config(objects)["applications"]
    folder = "/etc/baton/cluster-tls"
    assert application["args"]["security"] == {
        "tls": "files",
        "tls_cert": f"{folder}/tls.crt",
        "tls_key": f"{folder}/tls.key",
        "tls_ca": f"{folder}/ca.crt",
    }


def test_cert_manager_makes_what_every_pod_shows() -> None:
    objects = render({"clusterTls": {"issuer": {"name": "ours", "kind": "ClusterIssuer"}}})
    [certificate] = of_kind(objects, "Certificate").values()
    check(certificate)
    assert certificate["spec"]["issuerRef"] == {
        "name": "ours",
        "kind": "ClusterIssuer",
        "group": "cert-manager.io",
    }
    name = certificate["spec"]["secretName"]
    for pod in ("prefill", "decode", "ingress"):
        volumes = pods(objects)[pod]["spec"]["volumes"]
        assert {"name": "cluster-tls", "secret": {"secretName": name}} in volumes
    assert name not in json.dumps(pods(objects)["head"])
    assert serve_config(objects)["applications"][0]["args"]["security"]["tls"] == "files"


def test_certificates_belong_to_the_cluster_key_unless_the_values_say_otherwise() -> None:
    assert "security" not in serve_config(render())["applications"][0]["args"]
    off = render({"config": {"security": {"tls": False}}})
    assert load(serve_config(off)["applications"][0]["args"], {}).security.tls == "off"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"kvTls": {"existingSecret": "x"}}, "kvTls"),
        ({"config": {"security": {"tls": "files", "tls_cert": "/x"}}}, "use clusterTls.existingSecret"),
        ({"config": {"security": {"tls": "files"}}}, "use clusterTls.existingSecret"),
        (
            {"config": {"security": {"tls": "off"}}, "clusterTls": {"existingSecret": "x"}},
            "security.tls is off, and clusterTls",
        ),
        ({"clusterTls": {"existingSecret": "x", "issuer": {"name": "y"}}}, "give one of both"),
    ],
)
def test_values_of_tls_that_do_not_go_together_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(helm_python.HelmError, match=said):
        render(values)


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_secret_is_readable_and_rays_token_is_on(name: str) -> None:
    objects = example(name)
    public = json.dumps([made for made in objects if made["kind"] != "Secret"])
    for secret in of_kind(objects, "Secret").values():
        assert not any(value in public for value in secret["data"].values())
    assert cluster_spec(objects)["authOptions"]["mode"] == "token"


def test_who_may_ask_the_kubernetes_api_and_what() -> None:
    objects = example("h200-rdma")
    for name, template in pods(objects).items():
        assert template["spec"]["automountServiceAccountToken"] is (name in ("prefill", "decode"))
    [role] = of_kind(objects, "ClusterRole").values()
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]
    [binding] = of_kind(objects, "ClusterRoleBinding").values()
    [subject] = binding["subjects"]
    assert subject["name"] == pods(objects)["decode"]["spec"]["serviceAccountName"]
    env = {one["name"]: one for one in container(pods(objects)["decode"])["env"]}
    assert env["BATON_KUBE_NODE"]["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert label_names({"BATON_KUBE_LABELS": env["BATON_KUBE_LABELS"]["value"]})["rack"] == "example.com/rack"
    off = render({"topology": {"enabled": False}, "controller": {"enabled": False}})
    assert not any(made["kind"].endswith(("Role", "RoleBinding")) for made in off)
    assert not any(template["spec"]["automountServiceAccountToken"] for template in pods(off).values())


def test_topology_by_the_pods_own_labels_needs_no_right_at_all() -> None:
    values = {
        "topology": {"labelsOf": "pods", "labels": {"rack": "example.com/rack"}},
        "decode": {"labels": {"example.com/rack": "r7"}},
    }
    objects = render(values)
    assert not any(made["kind"].startswith("ClusterRole") for made in objects)
    for template in pods(objects).values():
        assert template["spec"]["automountServiceAccountToken"] is False
        check_pod(template)
    decode = pods(objects)["decode"]
    env = {one["name"]: one for one in container(decode)["env"]}
    assert "BATON_KUBE_NODE" not in env
    asked = {
        fact: env[f"{OWN}{fact.upper()}"]["valueFrom"]["fieldRef"]["fieldPath"].split("'")[1]
        for fact in LABELS
    }
    assert asked == LABELS | {"rack": "example.com/rack"}
    said = {
        f"{OWN}{fact.upper()}": decode["metadata"]["labels"].get(label, "") for fact, label in asked.items()
    }
    assert read_site({**said, "BATON_KUBE_LABELS": env["BATON_KUBE_LABELS"]["value"]}).rack == "r7"


@pytest.mark.parametrize("scale", [True, False])
def test_the_controller_may_do_what_it_does(scale: bool) -> None:
    objects = render({"controller": {"scale": scale}, "models": {"two": {}}})
    [role] = of_kind(objects, "Role").values()
    may = {
        (resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]
    }
    assert {("rayservices", "get"), ("rayclusters", "get"), ("events", "create")} <= may
    assert ({("rayclusters", "patch"), ("pods", "list")} <= may) is scale
    [deployment] = of_kind(objects, "Deployment").values()
    [controller] = deployment["spec"]["template"]["spec"]["containers"]
    command: list[str] = controller["command"]
    assert ("--scale" in command) is scale
    services = of_kind(objects, "Service")
    asked = [part.removeprefix("--endpoint=http://").split(":") for part in command if "endpoint" in part]
    assert {(name, int(port)) for name, port in asked} == {
        (name, made["spec"]["ports"][0]["port"]) for name, made in services.items()
    }
    parsed = parser().parse_args(command[3:])
    assert (parsed.namespace, parsed.kind, parsed.name) == ("llm", "RayService", "demo-baton")


def test_https_is_known_to_everybody_who_asks() -> None:
    objects = example("existing-secrets")
    [application] = serve_config(objects)["applications"]
    assert application["args"]["serve"]["tls_cert"] == "/etc/baton/ingress-tls/tls.crt"
    assert container(pods(objects)["ingress"])["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    [endpoint] = of_kind(objects, "PodMonitor")["demo-baton"]["spec"]["podMetricsEndpoints"]
    assert (endpoint["scheme"], endpoint["tlsConfig"]["ca"]["secret"]["name"]) == ("https", "llm-tls")
    [deployment] = of_kind(objects, "Deployment").values()
    command = deployment["spec"]["template"]["spec"]["containers"][0]["command"]
    assert {"--endpoint=https://demo-baton:80", "--ca=/etc/baton/ingress-tls/ca.crt"} <= set(command)


def test_prometheus_has_a_key_of_its_own() -> None:
    objects = example("everything")
    monitor = of_kind(objects, "PodMonitor")["demo-baton"]
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "demo-baton-api-keys", "key": "metrics-key"}
    made = of_kind(objects, "Secret")["demo-baton-api-keys"]["data"]
    metrics, keys = (base64.b64decode(made[name]).decode() for name in ("metrics-key", "api-keys"))
    client, prometheus = keys.splitlines()
    assert prometheus == f"{metrics} metrics", "and it reads metrics alone"
    assert client.startswith("sk-")
