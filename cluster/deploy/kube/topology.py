"""Where this pod's node stands, from the node's labels or from the pod's own; read once, when an instance starts.

Which label says what differs between clusters: `BATON_KUBE_LABELS` (JSON) names them. The pod's own come in variables, and need
no right to read anything."""

import importlib
import json
import logging
from collections.abc import Mapping
from typing import Any

from core.errors import ConfigError
from core.reports import Site

log = logging.getLogger(__name__)

LABELS = {
    "zone": "topology.kubernetes.io/zone",
    "rack": "topology.kubernetes.io/rack",
    "nvlink_domain": "nvidia.com/gpu.clique",
    "nic_gbit_per_s": "baton/nic-gbit-per-s",
}
NODE, NAMES, OWN = "BATON_KUBE_NODE", "BATON_KUBE_LABELS", "BATON_KUBE_POD_"
"""`OWN` and a fact in capitals have the pod's label."""


def read_site(env: Mapping[str, str]) -> Site:
    """Return where the node stands. Nothing is known outside of Kubernetes, nor of a node that cannot be read. Raises
    ConfigError."""
    names = label_names(env)
    if not env.get(NODE):
        return site_of({name: env.get(OWN + fact.upper(), "") for fact, name in names.items()}, names)
    try:
        labels = node_labels(_in_cluster(), env[NODE])
    except Exception as error:
        log.warning("the topology of node %s is not known: %s", env[NODE], error)
        return Site()
    return site_of(labels, names)


def node_labels(api: Any, node: str) -> dict[str, str]:
    """Return the node's labels. `api` is a kubernetes.client.ApiClient."""
    kubernetes = importlib.import_module("kubernetes")
    return kubernetes.client.CoreV1Api(api).read_node(node, _request_timeout=10).metadata.labels or {}


def _in_cluster() -> Any:
    """Return a client with this pod's service account. The package is an extra and takes a second to import, so it is imported
    here."""
    kubernetes = importlib.import_module("kubernetes")
    importlib.import_module("kubernetes.config").load_incluster_config()
    return kubernetes.client.ApiClient()


def label_names(env: Mapping[str, str]) -> dict[str, str]:
    """Return the labels' names by fact. Raises ConfigError for an unknown fact."""
    given: dict[str, str] = json.loads(env.get(NAMES, "{}"))
    if unknown := set(given) - set(LABELS):
        raise ConfigError(f"{NAMES}: {unknown.pop()!r} is none of {', '.join(LABELS)}")
    return LABELS | given


def site_of(labels: Mapping[str, str], names: Mapping[str, str]) -> Site:
    """Return where the node stands. `names` has the label of each fact. Raises ConfigError for a rate that is no number."""
    found = {fact: labels.get(name, "") for fact, name in names.items()}
    try:
        gbit_per_s = float(found["nic_gbit_per_s"] or 0)
    except ValueError:
        text = found["nic_gbit_per_s"]
        raise ConfigError(
            f"node label {names['nic_gbit_per_s']}: {text!r} is not a number of Gbit/s"
        ) from None
    return Site(found["zone"], found["rack"], found["nvlink_domain"], gbit_per_s * 1e9 / 8)
