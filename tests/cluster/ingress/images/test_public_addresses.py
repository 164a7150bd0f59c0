"""The walls of the fetcher against IANA's registries of special-purpose addresses, and against Python's own idea of them."""

import random
from ipaddress import IPv4Address, IPv6Address, ip_network

import pytest

from cluster.ingress.images.public_addresses import is_public

REGISTERED = [
    "0.0.0.0/8",
    "0.0.0.0/32",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.0.0/29",
    "192.0.0.8/32",
    "192.0.0.9/32",
    "192.0.0.10/32",
    "192.0.0.170/32",
    "192.0.0.171/32",
    "192.0.2.0/24",
    "192.31.196.0/24",
    "192.52.193.0/24",
    "192.88.99.0/24",
    "192.88.99.2/32",
    "192.168.0.0/16",
    "192.175.48.0/24",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "240.0.0.0/4",
    "255.255.255.255/32",
    "::1/128",
    "::/128",
    "::/96",
    "64:ff9b::/96",
    "64:ff9b:1::/48",
    "100::/64",
    "100:0:0:1::/64",
    "2001::/23",
    "2001::/32",
    "2001:1::1/128",
    "2001:1::2/128",
    "2001:1::3/128",
    "2001:2::/48",
    "2001:3::/32",
    "2001:4:112::/48",
    "2001:10::/28",
    "2001:20::/28",
    "2001:30::/28",
    "2001:db8::/32",
    "2002::/16",
    "2620:4f:8000::/48",
    "3fff::/20",
    "5f00::/16",
    "fc00::/7",
    "fe80::/10",
    "fec0::/10",
    "ff00::/8",
    "224.0.0.0/4",
    "::ffff:0:0:0/96",
]
"""IANA's two registries of special-purpose addresses, multicast, and what was withdrawn from use."""
WITHIN = [
    "::ffff:%s",  # mapped
    "::%s",  # compatible
    "::ffff:0:%s",  # translated
    "64:ff9b::%s",  # NAT64
    "64:ff9b:1::%s",  # NAT64 of a network
    "2606:4700::5efe:%s",  # ISATAP
    "2606:4700::200:5efe:%s",
]


@pytest.mark.parametrize("network", REGISTERED)
def test_no_special_address_is_public(network: str) -> None:
    found = ip_network(network)
    for place in (found[0], found[-1], found[found.num_addresses // 2]):
        assert not is_public(str(place)), place


@pytest.mark.parametrize("form", WITHIN)
@pytest.mark.parametrize("inside", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "168.63.129.16", "0.0.0.0"])
def test_no_address_of_the_inside_hides_within_another(form: str, inside: str) -> None:
    assert not is_public(form % inside)


@pytest.mark.parametrize(
    "inside", ["2002:7f00:1::", "2002:a9fe:a9fe::1", "2001:0:4136:e378:8000:63bf:80ff:fffe", "fe80::1%eth0"]
)
def test_nor_behind_a_tunnel(inside: str) -> None:
    assert not is_public(inside)


@pytest.mark.parametrize(
    "address",
    ["1.1.1.1", "8.8.8.8", "::ffff:1.1.1.1", "2606:4700:4700::1111", "2a00:1450:4001:80b::200e", "2600::1"],
)
def test_the_internet_is_public(address: str) -> None:
    assert is_public(address)


def test_nothing_is_public_that_python_does_not_take_for_global() -> None:
    some = random.Random(0)
    for _ in range(20_000):
        four, six = IPv4Address(some.getrandbits(32)), IPv6Address(some.getrandbits(128))
        for address in (four, six):
            assert address.is_global or not is_public(str(address)), address
