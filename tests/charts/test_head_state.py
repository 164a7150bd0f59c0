"""Where Ray's head keeps its state: the chart's own Valkey, or a Redis of the operator's."""

import base64
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from helm_python import HelmError

from tests.charts.rendering import cluster_spec, of_kind, render
from tests.charts.schemas import check

OWN = {"gcsFaultTolerance": {"enabled": True}}


def test_the_chart_brings_a_valkey_with_a_disk_and_a_password() -> None:
    objects = render(OWN)
    options = cluster_spec(objects)["gcsFaultToleranceOptions"]
    secret = {"name": "demo-baton-valkey", "key": "redis-password"}
    assert options == {
        "redisAddress": "demo-baton-valkey:6379",
        "redisPassword": {"valueFrom": {"secretKeyRef": secret}},
    }
    made = of_kind(objects, "Secret")["demo-baton-valkey"]
    assert len(base64.b64decode(made["data"]["redis-password"])) == 48
    assert made["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    [valkey] = of_kind(objects, "StatefulSet").values()
    service = of_kind(objects, "Service")["demo-baton-valkey"]
    check(valkey)
    check(service)
    spec = valkey["spec"]["template"]["spec"]
    [container] = spec["containers"]
    assert service["spec"]["selector"] == valkey["spec"]["template"]["metadata"]["labels"]
    assert container["env"] == [{"name": "REDISCLI_AUTH", "valueFrom": {"secretKeyRef": secret}}]
    assert {"memory", "ephemeral-storage"} <= set(container["resources"]["limits"])
    assert all(f"{kind}Probe" in container for kind in ("startup", "liveness", "readiness"))
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    [claim] = valkey["spec"]["volumeClaimTemplates"]
    assert {"name": claim["metadata"]["name"], "mountPath": "/data"} in container["volumeMounts"]


def test_it_is_as_large_and_where_it_is_told_to_be() -> None:
    values = {
        "image": "mirror.example/valkey:9",
        "size": "7Gi",
        "storageClass": "ssd",
        "resources": {"limits": {"memory": "3Gi"}},
        "tolerations": [{"operator": "Exists"}],
        "priorityClassName": "serving",
    }
    objects = render({"gcsFaultTolerance": {"enabled": True, "valkey": values}})
    [valkey] = of_kind(objects, "StatefulSet").values()
    check(valkey)
    pod = valkey["spec"]["template"]["spec"]
    assert (pod["tolerations"], pod["priorityClassName"]) == ([{"operator": "Exists"}], "serving")
    [container] = pod["containers"]
    assert container["image"] == "mirror.example/valkey:9"
    assert (container["resources"]["limits"]["memory"], container["resources"]["requests"]["cpu"]) == (
        "3Gi",
        "100m",
    )
    [claim] = valkey["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "ssd"
    assert claim["spec"]["resources"]["requests"]["storage"] == "7Gi"


def test_its_password_is_on_no_command_line(tmp_path: Path) -> None:
    """The server's stand-in writes down what it is given."""
    [valkey] = of_kind(render(OWN), "StatefulSet").values()
    [container] = valkey["spec"]["template"]["spec"]["containers"]
    server = tmp_path / "valkey-server"
    server.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat > {tmp_path}/input\n')
    server.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "REDISCLI_AUTH": "hush"}
    subprocess.run(container["command"], env=env, check=True, timeout=60)
    arguments = (tmp_path / "arguments").read_text()
    assert "hush" not in arguments
    assert arguments.split()[0] == "-", "it reads its configuration from standard input"
    assert {"--dir", "/data", "--appendonly"} <= set(arguments.split())
    assert (tmp_path / "input").read_text() == "requirepass hush\n"


@pytest.mark.skipif(not shutil.which("valkey-server"), reason="needs valkey-server")
def test_valkey_takes_the_password_from_its_standard_input(tmp_path: Path) -> None:
    [valkey] = of_kind(render(OWN), "StatefulSet").values()
    [container] = valkey["spec"]["template"]["spec"]["containers"]
    script = container["command"][-1].replace("/data", f"{tmp_path} --port 0 --unixsocket {tmp_path}/socket")
    env = {"PATH": os.environ["PATH"], "REDISCLI_AUTH": "hush"}
    with subprocess.Popen(["sh", "-c", script], env=env) as server:
        ping = ["valkey-cli", "-s", f"{tmp_path}/socket", "ping"]
        while not (tmp_path / "socket").exists():
            assert server.poll() is None
            time.sleep(0.01)
        said = subprocess.run(ping, env=env, capture_output=True, text=True, check=True, timeout=60)
        server.terminate()
    assert said.stdout.strip() == "PONG"


def test_a_redis_of_ones_own_has_an_address_and_a_secret() -> None:
    values = {"enabled": True, "address": "redis.example:6380", "username": "ray", "existingSecret": "mine"}
    objects = render({"gcsFaultTolerance": values})
    assert cluster_spec(objects)["gcsFaultToleranceOptions"] == {
        "redisAddress": "redis.example:6380",
        "redisUsername": {"value": "ray"},
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "mine", "key": "redis-password"}}},
    }
    assert not of_kind(objects, "StatefulSet")
    assert "demo-baton-valkey" not in of_kind(objects, "Secret")
    open_to_all = render({"gcsFaultTolerance": {"enabled": True, "address": "redis:6379"}})
    assert "redisPassword" not in cluster_spec(open_to_all)["gcsFaultToleranceOptions"]


def test_a_head_that_may_restart_may_be_evicted() -> None:
    assert "demo-baton-head" in of_kind(render(), "PodDisruptionBudget")
    assert "demo-baton-head" not in of_kind(render(OWN), "PodDisruptionBudget")
    assert "gcsFaultToleranceOptions" not in cluster_spec(render())


def test_an_address_that_is_not_used_is_refused() -> None:
    with pytest.raises(HelmError, match="set enabled"):
        render({"gcsFaultTolerance": {"address": "redis:6379"}})
    with pytest.raises(HelmError, match="address"):
        render({"gcsFaultTolerance": {"enabled": True, "address": "redis"}})
