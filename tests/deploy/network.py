"""Network namespaces of this machine, joined by a bridge."""

import contextlib
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path


def missing_network() -> str:
    """Why there can be no such namespaces here; empty when there can."""
    if os.geteuid():
        return "only root makes network namespaces"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if absent := [name for name in ("ip", "tc") if not shutil.which(name, path=path)]:
        return f"{', '.join(absent)} not installed (.ci/apt.txt)"
    name = f"bt{random.randrange(10**6)}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "network namespaces cannot be made here"
    run("ip", "netns", "del", name)
    return ""


class NetworkEnd:
    """A namespace with an address of its own on the bridge."""

    def __init__(self, name: str, address: str, bridge: str) -> None:
        self.name, self.address = name, address
        run("ip", "netns", "add", name)
        run("ip", "link", "add", f"{name}o", "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", f"{name}o", "master", bridge, "up")
        # Ray takes the address of the way out for its own: without one it would be 127.0.0.1.
        gateway = f"{address.rpartition('.')[0]}.1"
        for command in (
            f"addr add {address}/24 dev eth0",
            "link set eth0 up",
            "link set lo up",
            f"route add default via {gateway}",
        ):
            run("ip", "-n", name, *command.split())

    @property
    def path(self) -> Path:
        """What a process opens and gives to setns(2) to be here."""
        return Path("/run/netns") / self.name

    def slow(self, kbit_per_s: int) -> None:
        """Let no more than so much come in from the others."""
        limit = f"tbf rate {kbit_per_s}kbit burst 16kb latency 400ms"
        run("tc", "qdisc", "add", "dev", f"{self.name}o", "root", *limit.split())

    def pids(self) -> list[str]:
        listed = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False
        )
        return listed.stdout.split()

    def remove(self) -> None:
        run("ip", "netns", "del", self.name)


@contextlib.contextmanager
def network(num_ends: int) -> Iterator[list[NetworkEnd]]:
    """A bridge and so many namespaces at it."""
    token = f"{random.randrange(16**5):05x}"
    bridge, net = f"bb{token}", f"10.{random.randrange(64, 127)}.{random.randrange(1, 255)}"
    run("ip", "link", "add", bridge, "type", "bridge")
    ends: list[NetworkEnd] = []
    try:
        run("ip", "addr", "add", f"{net}.1/24", "dev", bridge)
        run("ip", "link", "set", bridge, "up")
        for i in range(num_ends):
            ends += [NetworkEnd(f"b{token}{i}", f"{net}.{10 + i}", bridge)]
        yield ends
    finally:
        for end in ends:
            end.remove()
        run("ip", "link", "del", bridge)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
