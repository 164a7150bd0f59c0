"""Machines for a test: network and process namespaces of this one, each with an sshd, a home, a /tmp/ray and a /dev/shm of its own.

Process namespaces are a must: `ray stop` ends every Ray process that it can see."""

import contextlib
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

_START = """
mount -t tmpfs tmpfs /dev/shm
mount --bind {folder}/ray /tmp/ray
mount --bind {folder}/passwd /etc/passwd
mkdir -p /run/sshd
hostname {name}
exec /usr/sbin/sshd -D -e -f {folder}/sshd_config
"""
_SSHD = """
HostKey {keys}/host
AuthorizedKeysFile {keys}/user.pub
ListenAddress {address}
PermitRootLogin yes
StrictModes no
UsePAM no
PidFile none
"""
_UNSHARE = "unshare --pid --mount --uts --ipc --fork --kill-child --mount-proc"
PROGRAMS = ("ip", "unshare", "sshd", "ssh", "ssh-keygen", "rsync", "nc")


def missing() -> str:
    """Why there can be no such machines here; empty when there can."""
    if os.geteuid():
        return "only root makes network namespaces"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if absent := [name for name in PROGRAMS if not shutil.which(name, path=path)]:
        return f"{', '.join(absent)} not installed (.ci/apt.txt)"
    name = f"bt{random.randrange(10**6)}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "network namespaces cannot be made here"
    tried = subprocess.run(
        f"ip netns exec {name} {_UNSHARE} true".split(),
        capture_output=True,
        check=False,
    )
    _run("ip", "netns", "del", name)
    return "process namespaces cannot be made here" if tried.returncode else ""


class Host:
    """One machine on the bridge. `kill` is its power cord."""

    def __init__(self, name: str, address: str, bridge: str, folder: Path, keys: Path, bashrc: str) -> None:
        self.name, self.address, self._folder = name, address, folder
        for part in ("ray", "home"):
            (folder / part).mkdir(parents=True)
        (folder / "home" / ".bashrc").write_text(bashrc)
        (folder / "home" / ".profile").write_text(". ~/.bashrc\n")
        (folder / "passwd").write_text(
            f"root:x:0:0:root:{folder}/home:/bin/bash\nsshd:x:100:65534::/run/sshd:/bin/false\n"
        )
        (folder / "sshd_config").write_text(_SSHD.format(keys=keys, address=address))
        (folder / "start").write_text(_START.format(folder=folder, name=name))
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", f"{name}o", "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "link", "set", f"{name}o", "master", bridge, "up")
        # Ray takes the address of the way out for its own: without one it would be 127.0.0.1.
        gateway = f"{address.rpartition('.')[0]}.1"
        for command in (
            f"addr add {address}/24 dev eth0",
            "link set eth0 up",
            "link set lo up",
            f"route add default via {gateway}",
        ):
            _run("ip", "-n", name, *command.split())
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*f"ip netns exec {name} {_UNSHARE} bash -e".split(), str(folder / "start")],
                stdout=log,
                stderr=log,
                env={"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
            )

    def num_ray_processes(self) -> int:
        """Ray's processes on this machine."""
        pids = _output("ip", "netns", "pids", self.name).split()
        names = [Path(f"/proc/{pid}/cmdline") for pid in pids]
        num = 0
        for name in names:
            with contextlib.suppress(OSError):
                num += any(part in name.read_bytes() for part in (b"raylet", b"gcs_server", b"ray::"))
        return num

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def remove(self) -> None:
        self.kill()
        for _ in range(50):
            if not _output("ip", "netns", "pids", self.name).split():
                break
            time.sleep(0.1)
        _run("ip", "netns", "del", self.name)


@contextlib.contextmanager
def hosts(roles: Mapping[str, str], folder: Path) -> Iterator[tuple[list[Host], Path]]:
    """A machine for each of `roles` (name: what its ~/.bashrc says), and the key that opens them all."""
    token = f"{random.randrange(16**5):05x}"
    bridge, net = f"bb{token}", f"10.{random.randrange(64, 127)}.{random.randrange(1, 255)}"
    keys = folder / "keys"
    keys.mkdir()
    for key in ("host", "user"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / key))
    Path("/tmp/ray").mkdir(exist_ok=True)
    _run("ip", "link", "add", bridge, "type", "bridge")
    machines: list[Host] = []
    try:
        _run("ip", "addr", "add", f"{net}.1/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        for i, (role, bashrc) in enumerate(roles.items()):
            machines.append(Host(f"b{token}{i}", f"{net}.{10 + i}", bridge, folder / role, keys, bashrc))
        for machine in machines:
            _wait_ssh(machine.address, keys / "user")
        yield machines, keys / "user"
    finally:
        for machine in machines:
            machine.remove()
        _run("ip", "link", "del", bridge)


def _wait_ssh(address: str, key: Path) -> None:
    options = [
        "-o",
        "StrictHostKeyChecking=no",
        "-o",
        "UserKnownHostsFile=/dev/null",
        "-o",
        "ConnectTimeout=2",
    ]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        command = ["ssh", "-i", str(key), *options, f"root@{address}", "true"]
        if subprocess.run(command, capture_output=True, check=False, timeout=30).returncode == 0:
            return
        time.sleep(0.2)
    raise AssertionError(f"no ssh to {address}")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
