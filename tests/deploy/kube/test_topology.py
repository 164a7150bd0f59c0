"""From a node's labels to what the scheduler assumes of a link."""

import pytest
from kubernetes import client

from cluster.deploy.kube.topology import LABELS, label_names, node_labels, read_site, site_of
from core.errors import ConfigError
from core.reports import Site
from tests.deploy.kube.fake_api import FakeApi


def test_the_labels_of_a_node() -> None:
    api = FakeApi()
    labels = {
        "topology.kubernetes.io/zone": "eu-1a",
        "topology.kubernetes.io/rack": "r7",
        "nvidia.com/gpu.clique": "fabric.3",
        "baton/nic-gbit-per-s": "400",
    }
    api.nodes["n1"] = {"metadata": {"name": "n1", "labels": labels}}
    with api.serving() as url:
        read = node_labels(client.ApiClient(client.Configuration(host=url)), "n1")
    assert site_of(read, LABELS) == Site("eu-1a", "r7", "fabric.3", 50e9)


def test_labels_of_another_name() -> None:
    names = label_names({"BATON_KUBE_LABELS": '{"rack": "example.com/rack"}'})
    assert site_of({"example.com/rack": "b"}, names) == Site(rack="b")
    with pytest.raises(ConfigError, match="row"):
        label_names({"BATON_KUBE_LABELS": '{"row": "x"}'})
    with pytest.raises(ConfigError, match="fast"):
        site_of({"baton/nic-gbit-per-s": "fast"}, LABELS)


def test_the_pods_own_labels_do_without_the_api() -> None:
    env = {
        "BATON_KUBE_POD_ZONE": "eu-1a",
        "BATON_KUBE_POD_RACK": "",
        "BATON_KUBE_POD_NVLINK_DOMAIN": "fabric.3",
        "BATON_KUBE_POD_NIC_GBIT_PER_S": "400",
    }
    assert read_site(env) == Site("eu-1a", "", "fabric.3", 50e9)
    with pytest.raises(ConfigError, match="fast"):
        read_site({"BATON_KUBE_POD_NIC_GBIT_PER_S": "fast"})


def test_nothing_is_known_elsewhere_or_without_the_right_to_read() -> None:
    assert read_site({}) == Site()
    assert read_site({"BATON_KUBE_NODE": "n1"}) == Site(), "this process is in no cluster"
