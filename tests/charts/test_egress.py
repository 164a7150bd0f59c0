"""What pods may reach outside of the release, once egress is closed."""

import ipaddress
from typing import Any

import pytest

from tests.charts.rendering import Object, all_pods, of_kind, pods, render, selects
from tests.charts.schemas import check

Reach = list[tuple[Object, set[tuple[str, int]]]]
"""(peer, ports) of each rule; an empty peer is every address, no ports are all of them."""


def reach(objects: list[Object], labels: dict[str, str]) -> Reach:
    """What a pod with these labels may reach: the sum of all policies that select it."""
    rules = [
        rule
        for policy in of_kind(objects, "NetworkPolicy").values()
        if "Egress" in policy["spec"]["policyTypes"] and selects(policy["spec"]["podSelector"], labels)
        for rule in policy["spec"]["egress"]
    ]
    assert rules, "nothing bounds it"
    return [
        (peer, {(port["protocol"], port["port"]) for port in rule.get("ports", [])})
        for rule in rules
        for peer in rule.get("to", [{}])
    ]


def may_reach(found: Reach, address: str, port: int) -> bool:
    """Whether a TCP connection to an address outside of the cluster is let through."""
    wanted = ipaddress.ip_address(address)

    def holds(peer: Object) -> bool:
        if "ipBlock" not in peer:
            return not peer
        block: dict[str, Any] = peer["ipBlock"]
        inside = [ipaddress.ip_network(net) for net in (block["cidr"], *block.get("except", []))]
        return wanted in inside[0] and not any(wanted in net for net in inside[1:])

    return any(holds(peer) and (not ports or ("TCP", port) in ports) for peer, ports in found)


CLOSED: Object = {
    "networkPolicy": {"egress": {"enabled": True, "kubernetesApi": [{"ipBlock": {"cidr": "10.96.0.1/32"}}]}}
}


def labels_of(objects: list[Object], group: str) -> dict[str, str]:
    return pods(objects)[group]["metadata"]["labels"]


def test_egress_is_open_unless_it_is_closed() -> None:
    policies = of_kind(render(), "NetworkPolicy").values()
    assert not any("Egress" in policy["spec"]["policyTypes"] for policy in policies)


def test_every_pod_reaches_the_release_and_names_and_no_metadata_service() -> None:
    objects = render(CLOSED)
    for template in all_pods(objects):
        found = reach(objects, template["metadata"]["labels"])
        [own] = [ports for peer, ports in found if set(peer) == {"podSelector"}]
        assert own == set()
        [dns] = [(peer, ports) for peer, ports in found if "namespaceSelector" in peer]
        assert dns[0]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "kube-system"}
        assert dns[1] == {("UDP", 53), ("TCP", 53)}
        assert not may_reach(found, "169.254.169.254", 80), "a cloud's credentials"
        assert not may_reach(found, "10.1.2.3", 5432)
    for policy in of_kind(objects, "NetworkPolicy").values():
        check(policy)


def test_models_come_from_public_addresses_alone_and_only_for_those_that_load_them() -> None:
    objects = render(CLOSED)
    for group, loads in (("ingress", True), ("prefill", True), ("decode", True), ("head", False)):
        found = reach(objects, labels_of(objects, group))
        assert may_reach(found, "18.155.1.1", 443) is loads
        assert not may_reach(found, "18.155.1.1", 80)
        assert not may_reach(found, "192.168.0.7", 443)


def test_images_come_at_the_ports_of_the_hosts_that_are_allowed_and_for_ingresses_alone() -> None:
    hosts = {"config": {"pictures": {"url_hosts": ["img.example.com:8080", "cdn.example.com"]}}}
    objects = render(CLOSED | hosts)
    found = reach(objects, labels_of(objects, "ingress"))
    assert [may_reach(found, "18.155.1.1", port) for port in (80, 443, 8080, 9000)] == [True] * 3 + [False]
    assert not may_reach(reach(objects, labels_of(objects, "decode")), "18.155.1.1", 8080)
    assert "demo-baton-egress-images" not in of_kind(render(CLOSED), "NetworkPolicy")


@pytest.mark.parametrize("topology", [True, False])
def test_the_kubernetes_api_is_for_those_that_ask_it(topology: bool) -> None:
    objects = render(CLOSED | {"topology": {"enabled": topology}})
    [controller] = of_kind(objects, "Deployment").values()
    asks = {"decode": topology, "prefill": topology, "ingress": False, "head": False}
    for group, does in asks.items():
        assert may_reach(reach(objects, labels_of(objects, group)), "10.96.0.1", 443) is does
    found = reach(objects, controller["spec"]["template"]["metadata"]["labels"])
    assert may_reach(found, "10.96.0.1", 443)
    assert not may_reach(found, "18.155.1.1", 443)
    scaled = render(CLOSED | {"autoscaling": {"enabled": True}})
    assert may_reach(reach(scaled, labels_of(scaled, "head")), "10.96.0.1", 443)


def test_more_may_be_opened() -> None:
    collector = {"to": [{"ipBlock": {"cidr": "10.9.9.9/32"}}], "ports": [{"port": 4318, "protocol": "TCP"}]}
    objects = render({"networkPolicy": {"egress": {"enabled": True, "others": [collector]}}})
    assert may_reach(reach(objects, labels_of(objects, "ingress")), "10.9.9.9", 4318)
    redis = {"gcsFaultTolerance": {"enabled": True, "address": "redis.example:6380"}}
    objects = render(CLOSED | redis)
    assert may_reach(reach(objects, labels_of(objects, "head")), "10.7.7.7", 6380)
    assert not may_reach(reach(objects, labels_of(objects, "decode")), "10.7.7.7", 6380)
