"""`baton up`, deploy, stream, kill a node, stream, `baton down`: on three machines with sshd's, through the example's own files."""

import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from kernels.cpu.build import cache_folder
from tests.deploy.hosts import Host, hosts, missing
from tests.deploy.ray_nodes import last_words
from tests.e2e.cluster_process import ROOT
from tests.e2e.reference import corpus_prompts, greedy_texts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.turns(6, number=2)]
PORT = 8000
BASHRC = """
export PATH={venv}:$PATH RAY_AUTH_MODE=token RAY_worker_niceness=0 BATON_ROLE={role}
export XDG_CACHE_HOME={cache} BATON_MAX_CPU_ISA={isa}
cd {root}
"""


def bashrc(role: str) -> str:
    """Say what role a machine has. Its home is empty, and each would compile the native kernels for itself."""
    cache, isa = cache_folder().parents[1], os.environ["BATON_MAX_CPU_ISA"]
    return BASHRC.format(venv=ROOT / ".venv" / "bin", role=role, cache=cache, isa=isa, root=ROOT)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Host], Path]]:
    if reason := missing():
        pytest.skip(reason)
    roles = {"head": bashrc("prefill"), "one": bashrc("decode"), "two": bashrc("decode")}
    folder = tmp_path_factory.mktemp("hosts")
    with hosts(roles, folder) as found:
        yield found
        sys.stdout.write(last_words(folder.glob("*/ray/session_*")))


class Cli:
    """`baton ...` on the operator's machine, with a token of its own."""

    def __init__(self, folder: Path) -> None:
        self._token = folder / "auth_token"
        self._token.write_text(secrets.token_hex(32))
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self.env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._token)}

    def __call__(self, *args: str, timeout_s: float = 900) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "baton.cli", *args],
            cwd=ROOT,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"baton {args[0]}: {done.stdout[-4000:]}"
        return done.stdout

    @property
    def mounts(self) -> dict[str, str]:
        return {"~/.ray/auth_token": str(self._token)}


def cluster_file(found: list[Host], key: Path, cli: Cli, path: Path) -> Path:
    """The example for machines of one's own, with these machines; Baton is installed on them already."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "ray-up" / "on-premises.yaml").read_text())
    config["cluster_name"] = found[0].name
    config["provider"] |= {"head_ip": found[0].address, "worker_ips": [host.address for host in found[1:]]}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(key)}
    config["setup_commands"] = []
    config["file_mounts"] = cli.mounts
    path.write_text(yaml.safe_dump(config))
    return path


def app_file(path: Path) -> Path:
    content: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "ray-up" / "app.yaml").read_text())
    application = content["applications"][0]
    application["args"]["model"] = {"path": "embedded"}
    application["args"]["serve"] |= {"port": PORT, "drain_notice_s": 0.5}
    for deployment, num in zip(application["deployments"], (1, 1, 1, 2), strict=True):
        if deployment["name"] != "Scheduler":  # which has a spare
            deployment["num_replicas"] = num
        deployment["ray_actor_options"] |= {"num_cpus": 0.1, "num_gpus": 0}
    path.write_text(yaml.safe_dump(content))
    return path


class Reader:
    """Reads one stream in a thread; `text` is what has come."""

    def __init__(self, url: str, prompt: tuple[int, ...], max_tokens: int) -> None:
        self._body = {"model": "baton-embedded", "prompt": list(prompt), "temperature": 0, "stream": True}
        self._body["max_tokens"] = max_tokens
        self._url, self.text, self.begun = url, "", threading.Event()
        self._error: httpx.HTTPError | None = None
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            self._stream()
        except httpx.HTTPError as error:
            self._error = error

    def _stream(self) -> None:
        with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=300) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.text += "".join(c["text"] for c in json.loads(line[6:])["choices"])
                    self.begun.set()

    def join(self) -> str:
        self._thread.join(300)
        assert self._error is None, self._error
        return self.text


def test_from_ray_up_to_ray_down(machines: tuple[list[Host], Path], tmp_path: Path) -> None:
    found, key = machines
    head, one, two = found
    cli = Cli(tmp_path)
    cluster = str(cluster_file(found, key, cli, tmp_path / "cluster.yaml"))
    cli("up", cluster)
    cli("deploy", str(app_file(tmp_path / "app.yaml")), "--cluster", cluster, "--timeout-s", "800")
    assert "DecodePool 2/2" in cli("status", "--cluster", cluster)
    url = f"http://{head.address}:{PORT}"
    prompts = corpus_prompts(3, min_tokens=100, max_tokens=200)
    expected = greedy_texts(prompts, 150)

    assert Reader(url, prompts[0], 150).join() == expected[0]
    readers = [Reader(url, prompt, 150) for prompt in prompts]
    for reader in readers:
        assert reader.begun.wait(200)
    two.kill()
    assert [reader.join() for reader in readers] == expected
    assert Reader(url, prompts[1], 150).join() == expected[1]

    assert min(head.num_ray_processes(), one.num_ray_processes()) > 1
    cli("down", cluster)
    deadline = time.monotonic() + 90
    while (left := head.num_ray_processes() + one.num_ray_processes()) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left == 0
