"""What an object must obey: Kubernetes' schemas, KubeRay's (from its CRDs), and for other operators' kinds what is used of them."""

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tests.charts.rendering import Object

KUBERNETES = "1.32.0"
NEWER = {"resource.k8s.io/v1": "1.34.0"}
"""The first version of Kubernetes that has these."""
KUBERAY = Path(__file__).parents[3] / "shared" / "kuberay"

_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_ENDPOINT = {
    "type": "object",
    "required": ["port"],
    "additionalProperties": False,
    "properties": {
        "port": {"type": "string"},
        "path": {"type": "string", "pattern": "^/"},
        "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
        "scheme": {"enum": ["http", "https"]},
        "tlsConfig": {"type": "object", "required": ["ca", "serverName"]},
        "authorization": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"credentials": {"type": "object", "required": ["name", "key"]}},
        },
    },
}
_RULE = {
    "type": "object",
    "required": ["expr"],
    "oneOf": [{"required": ["alert"]}, {"required": ["record"]}],
    "properties": {"expr": {"type": "string"}, "labels": _TEXTS, "annotations": _TEXTS},
}
_GROUP = {
    "type": "object",
    "required": ["name", "rules"],
    "properties": {"name": {"type": "string"}, "rules": {"type": "array", "items": _RULE}},
}
_ROUTE_RULE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["backendRefs"],
    "properties": {
        "matches": {"type": "array"},
        "backendRefs": {"type": "array", "items": {"type": "object", "required": ["name", "port"]}},
        "timeouts": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "request": {"type": "string", "pattern": "^[0-9]{1,5}(h|m|s|ms)$"},
                "backendRequest": {"type": "string", "pattern": "^[0-9]{1,5}(h|m|s|ms)$"},
            },
        },
    },
}


def _spec(*required: str, **properties: Any) -> Object:
    return {
        "type": "object",
        "required": list(required),
        "properties": properties,
        "additionalProperties": False,
    }


_TRIGGER = _spec(
    "type",
    "metadata",
    type={"const": "prometheus"},
    metricType={"enum": ["AverageValue", "Value"]},
    metadata=_TEXTS,
    authenticationRef=_spec("name", name={"type": "string"}),
)
OTHERS: dict[tuple[str, str], Object] = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): _spec(
        "leaderWorkerTemplate",
        replicas={"type": "integer", "minimum": 0},
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        rolloutStrategy=_spec(
            "type",
            type={"const": "RollingUpdate"},
            rollingUpdateConfiguration=_spec(
                maxUnavailable={"type": "integer"}, maxSurge={"type": "integer"}
            ),
        ),
        leaderWorkerTemplate=_spec(
            "workerTemplate",
            size={"type": "integer", "minimum": 1},
            restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
            workerTemplate={"type": "object"},
        ),
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): _spec(
        "scaleTargetRef",
        "triggers",
        scaleTargetRef=_spec("name", **{key: {"type": "string"} for key in ("apiVersion", "kind", "name")}),
        minReplicaCount={"type": "integer", "minimum": 0},
        maxReplicaCount={"type": "integer", "minimum": 1},
        pollingInterval={"type": "integer"},
        cooldownPeriod={"type": "integer"},
        triggers={"type": "array", "minItems": 1, "items": _TRIGGER},
    ),
    ("resource.nvidia.com/v1beta1", "ComputeDomain"): _spec(
        "numNodes",
        "channel",
        numNodes={"type": "integer", "minimum": 0},
        channel=_spec("resourceClaimTemplate", resourceClaimTemplate=_spec("name", name={"type": "string"})),
    ),
    ("cert-manager.io/v1", "Certificate"): _spec(
        "secretName",
        "issuerRef",
        secretName={"type": "string"},
        issuerRef=_spec("name", **{key: {"type": "string"} for key in ("name", "kind", "group")}),
        dnsNames={"type": "array", "minItems": 1, "items": {"type": "string"}},
        usages={"type": "array", "items": {"enum": ["digital signature", "server auth", "client auth"]}},
        privateKey=_spec(
            algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]},
            size={"type": "integer"},
            rotationPolicy={"enum": ["Never", "Always"]},
        ),
    ),
    ("monitoring.coreos.com/v1", "PodMonitor"): _spec(
        "selector",
        "podMetricsEndpoints",
        selector={"type": "object"},
        podMetricsEndpoints={"type": "array", "items": _ENDPOINT},
        podTargetLabels={"type": "array", "items": {"type": "string"}},
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _spec(
        "groups", groups={"type": "array", "items": _GROUP, "minItems": 1}
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): _spec(
        "parentRefs",
        "rules",
        parentRefs={
            "type": "array",
            "minItems": 1,
            "items": {"type": "object", "required": ["name"]},
        },
        hostnames={"type": "array", "items": {"type": "string"}},
        rules={"type": "array", "items": _ROUTE_RULE, "minItems": 1},
    ),
}
"""Kinds whose schemas are not at hand: the part of their `spec` that the chart uses, after their operators' references."""


def check(made: Object) -> None:
    """Raises a ValidationError, or SchemaNotFoundError for a kind that nobody knows."""
    version, kind = made["apiVersion"], made["kind"]
    if version == "ray.io/v1":
        if not KUBERAY.exists():
            pytest.skip("KubeRay's schemas are not here")
        _kuberay(kind).validate(_without_nulls(made))
    elif (version, kind) in OTHERS:
        jsonschema.validate(made["spec"], OTHERS[version, kind])
    else:
        _kubernetes(json.dumps(made))


def check_pod(template: Object) -> None:
    """A pod template as the Kubernetes API would take it in a Pod; KubeRay's own schema is laxer."""
    pod = {"apiVersion": "v1", "kind": "Pod", **template}
    _kubernetes(json.dumps(_without_nulls(pod)))


@cache
def _kubernetes(made: str) -> None:
    """Examples have many objects in common, and the schemas of all are read again for each that is checked."""
    content = json.loads(made)
    version = NEWER.get(content["apiVersion"], KUBERNETES)
    kubernetes_validate.validate(content, version, strict=True)


@cache
def _kuberay(kind: str) -> jsonschema.Draft202012Validator:
    packed = (KUBERAY / f"{kind}.v1.schema.json.gz").read_bytes()
    return jsonschema.Draft202012Validator(_strict(json.loads(gzip.decompress(packed))))


def _strict(node: Any) -> Any:
    """As the API server validates: unknown fields are refused, a field with a default need not be given."""
    if isinstance(node, list):
        return [_strict(one) for one in node]
    if not isinstance(node, dict):
        return node
    made = {key: _strict(value) for key, value in node.items()}
    properties = made.get("properties")
    if node.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if isinstance(properties, dict):
        if "metadata" in properties:
            properties["metadata"] = {"type": "object"}
        free = made.get("x-kubernetes-preserve-unknown-fields")
        if "additionalProperties" not in made and not free:
            made["additionalProperties"] = False
        if "required" in made:
            made["required"] = [
                name
                for name in made["required"]
                if not (isinstance(properties.get(name), dict) and "default" in properties[name])
            ]
    return made


def _without_nulls(node: Any) -> Any:
    match node:
        case dict():
            return {key: _without_nulls(value) for key, value in node.items() if value is not None}
        case list():
            return [_without_nulls(value) for value in node]
        case _:
            return node
