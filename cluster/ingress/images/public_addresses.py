"""Says which addresses everybody reaches: what is neither private nor special in IANA's registries of special-purpose addresses.

IPv6 is public only within the block from which global addresses are given out. An IPv4 address within an IPv6 one counts, too."""

from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

_SPECIAL_V4: Final = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",  # this network
            "10.0.0.0/8",  # private
            "100.64.0.0/10",  # shared by a provider's customers
            "127.0.0.0/8",  # loopback
            "168.63.129.16/32",  # not in the registry: Azure's agent for each virtual machine
            "169.254.0.0/16",  # link-local, with the clouds' metadata
            "172.16.0.0/12",  # private
            "192.0.0.0/24",  # protocol assignments
            "192.0.2.0/24",  # documentation
            "192.31.196.0/24",  # AS112
            "192.52.193.0/24",  # multicast tunnels
            "192.88.99.0/24",  # relays to 6to4
            "192.168.0.0/16",  # private
            "192.175.48.0/24",  # AS112
            "198.18.0.0/15",  # measurements
            "198.51.100.0/24",  # documentation
            "203.0.113.0/24",  # documentation
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, and broadcast
        ),
    )
)
_GLOBAL_V6: Final = IPv6Network("2000::/3")
_SPECIAL_V6: Final = tuple(
    map(
        IPv6Network,
        (
            "2001::/23",  # protocol assignments, with Teredo and ORCHID
            "2001:db8::/32",  # documentation
            "2002::/16",  # 6to4
            "2620:4f:8000::/48",  # AS112
            "3ffe::/16",  # 6bone, returned
            "3fff::/20",  # documentation
        ),
    )
)
_MAPPED: Final = IPv6Network("::ffff:0:0/96")
_ISATAP: Final = (0x00005EFE, 0x02005EFE)
"""What stands before the IPv4 address in the last 64 bits, within any network."""


def is_public(address: str) -> bool:
    """Return whether everybody reaches the address, also by the IPv4 address within an IPv6 one."""
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv4Address):
        return not any(found in network for network in _SPECIAL_V4)
    if found in _MAPPED:
        return is_public(str(IPv4Address(int(found) & 0xFFFFFFFF)))
    if found not in _GLOBAL_V6 or any(found in network for network in _SPECIAL_V6):
        return False
    return all(is_public(str(within)) for within in _embedded(found))


def _embedded(address: IPv6Address) -> Iterator[IPv4Address]:
    """Yield the IPv4 addresses that a tunnel or a translator may take an address for."""
    if (int(address) >> 32) & 0xFFFFFFFF in _ISATAP:
        yield IPv4Address(int(address) & 0xFFFFFFFF)
