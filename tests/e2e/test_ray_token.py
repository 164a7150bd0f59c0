"""A Ray cluster that `baton serve` starts lets in nobody without its token."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.cluster_process import ROOT, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

JOIN = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
print("joined", len(ray.nodes()))
"""


def join(address: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # Without this Ray replaces a loopback address by the host's in the network, where nobody listens.
    environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    command = [sys.executable, "-c", JOIN, address]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_only_with_the_token(tmp_path: Path) -> None:
    with serving("--prefill", "0", "--decode", "1", log=tmp_path / "log") as server:
        flags = [part for process in server.descendants() for part in process.cmdline()]
        ports = {flag.partition("=")[2] for flag in flags if flag.startswith("--gcs_server_port=")}
        addresses = {flag.partition("=")[2] for flag in flags if flag.startswith("--gcs-address=")}
        address = sorted(addresses)[0] if addresses else f"127.0.0.1:{ports.pop()}"
        stranger = join(address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64)
        assert "joined" not in stranger.stdout, "a wrong token is let in"
        nobody = join(address, RAY_AUTH_MODE="disabled")
        assert "joined" not in nobody.stdout, "no token is let in"
        assert "joined 1" in join(address, RAY_AUTH_MODE="token").stdout
