"""Two ingresses and a load balancer before them, as processes, with the configuration files of the examples."""

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.e2e.cluster_process import ROOT
from tests.patience import PATIENCE_S
from tests.ports import free_port

EXAMPLES = ROOT / "examples" / "load-balancer"
BALANCERS = {"haproxy": "haproxy.cfg", "nginx": "nginx.conf"}


class Ingress:
    """A paced ingress on `port`; may be started, drained and killed again and again."""

    def __init__(self, pause_s: float, notice_s: float, log: Path) -> None:
        self.port = free_port()
        self._command = [
            *(sys.executable, "-m", "tests.deploy.paced_ingress"),
            *(str(self.port), str(pause_s), str(notice_s)),
        ]
        self._log = log
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as out:
            self.process = subprocess.Popen(self._command, cwd=ROOT, stdout=out, stderr=out)

    def wait_ready(self) -> None:
        wait_for(f"http://127.0.0.1:{self.port}/ready", self.process, self._log)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)


@contextlib.contextmanager
def balancer(kind: str, ports: list[int], folder: Path) -> Iterator[str]:
    """The address of a `kind` of load balancer before the ingresses on `ports`."""
    port = free_port()
    config = (EXAMPLES / BALANCERS[kind]).read_text()
    replaced = {"bind *:80": f"bind 127.0.0.1:{port}", "listen 80;": f"listen 127.0.0.1:{port};"}
    replaced |= {f"10.0.0.{11 + i}:8000": f"127.0.0.1:{ingress}" for i, ingress in enumerate(ports)}
    for old, new in replaced.items():
        config = config.replace(old, new)
    path = folder / BALANCERS[kind]
    log = folder / f"{kind}.log"
    path.write_text(_in_folder(config, folder) if kind == "nginx" else config)
    command = {
        "haproxy": ["haproxy", "-db", "-f", str(path)],
        "nginx": ["nginx", "-p", str(folder), "-c", str(path), "-g", f"daemon off; pid {folder}/nginx.pid;"],
    }[kind]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            wait_for(f"http://127.0.0.1:{port}/ready", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _in_folder(config: str, folder: Path) -> str:
    """nginx keeps temporary files in folders of the system otherwise; its workers must reach them."""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "".join(f"    {kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    return "user root;\n" + config.replace("http {\n", "http {\n" + paths, 1)


def missing(kind: str) -> str:
    """Why `kind` cannot be run here; empty when it can."""
    return "" if shutil.which(kind) else f"{kind} is not installed (.ci/apt.txt)"


def wait_for(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-2000:]
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError(f"{url} does not answer: {log.read_text()[-2000:]}")
