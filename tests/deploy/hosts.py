"""Machines for a test: network and process namespaces of this one, each with an sshd, a home, a /tmp/ray and a /dev/shm of its own.

Process namespaces are a must: `ray stop` ends every Ray process that it can see."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.deploy.network import NetworkEnd, missing_network, network, run
from tests.patience import PATIENCE_S

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
PROGRAMS = ("unshare", "sshd", "ssh", "ssh-keygen", "rsync", "nc")


def missing() -> str:
    """Why there can be no such machines here; empty when there can."""
    if os.geteuid():
        return "only root makes network namespaces"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if absent := [name for name in PROGRAMS if not shutil.which(name, path=path)]:
        return f"{', '.join(absent)} not installed (.ci/apt.txt)"
    return missing_network() or _missing_processes()


def _missing_processes() -> str:
    tried = subprocess.run([*_UNSHARE.split(), "true"], capture_output=True, check=False)
    return "process namespaces cannot be made here" if tried.returncode else ""


class Host:
    """One machine on the bridge. `kill` is its power cord."""

    def __init__(self, end: NetworkEnd, folder: Path, keys: Path, bashrc: str) -> None:
        self._end, self.name, self.address = end, end.name, end.address
        for part in ("ray", "home"):
            (folder / part).mkdir(parents=True)
        (folder / "home" / ".bashrc").write_text(bashrc)
        (folder / "home" / ".profile").write_text(". ~/.bashrc\n")
        (folder / "passwd").write_text(
            f"root:x:0:0:root:{folder}/home:/bin/bash\nsshd:x:100:65534::/run/sshd:/bin/false\n"
        )
        (folder / "sshd_config").write_text(_SSHD.format(keys=keys, address=end.address))
        (folder / "start").write_text(_START.format(folder=folder, name=end.name))
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*f"ip netns exec {end.name} {_UNSHARE} bash -e".split(), str(folder / "start")],
                stdout=log,
                stderr=log,
                env={"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
            )

    def num_ray_processes(self) -> int:
        """Raylets, control stores and workers on this machine. Ray's agents hold nothing, and try for a minute to tell a control store
        that is gone of the end of their raylet."""
        return sum(map(_is_part_of_ray, self._end.pids()))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)

    def end(self) -> None:
        """Kill it, and wait until its processes have ended."""
        self.kill()
        for _ in range(50):
            if not self._end.pids():
                break
            time.sleep(0.1)


def _is_part_of_ray(pid: str) -> bool:
    """Agents are titled as workers are: `ray::RuntimeEnvAgent`."""
    with contextlib.suppress(OSError):
        name = Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0]
        return name.endswith((b"raylet/raylet", b"gcs_server")) or (
            name.startswith(b"ray::") and b"Agent" not in name
        )
    return False


@contextlib.contextmanager
def hosts(roles: Mapping[str, str], folder: Path) -> Iterator[tuple[list[Host], Path]]:
    """A machine for each of `roles` (name: what its ~/.bashrc says), and the key that opens them all."""
    keys = folder / "keys"
    keys.mkdir()
    for key in ("host", "user"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / key))
    Path("/tmp/ray").mkdir(exist_ok=True)
    with network(len(roles)) as ends, contextlib.ExitStack() as stack:
        machines: list[Host] = []
        for end, (role, bashrc) in zip(ends, roles.items(), strict=True):
            machines.append(Host(end, folder / role, keys, bashrc))
            stack.callback(machines[-1].end)
        for machine in machines:
            _wait_ssh(machine.address, keys / "user")
        yield machines, keys / "user"


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
