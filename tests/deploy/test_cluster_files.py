"""Ray's cluster files of the examples against Ray's own schema, and what they promise to Baton."""

import copy
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.cli.ray_up import read_cluster_file
from cluster.deploy.serve_file import check_serve_file
from core.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "examples" / "ray-up"
FILES = [FOLDER / f"{name}.yaml" for name in ("aws", "gcp", "on-premises")]
APP = yaml.safe_load((FOLDER / "app.yaml").read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_ray_accepts_it_and_a_typo_is_named(path: Path, tmp_path: Path) -> None:
    config = read_cluster_file(path)
    text = " ".join(config["head_start_ray_commands"] + config["setup_commands"])
    assert "--autoscaling-config" in text
    assert "RAY_AUTH_MODE=token" in text
    assert "~/.ray/auth_token" in config["file_mounts"]
    wrong: Any = copy.deepcopy(yaml.safe_load(path.read_text()))
    wrong["setup_comands"] = wrong.pop("setup_commands")
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(wrong))
    with pytest.raises(ConfigError, match="setup_comands"):
        read_cluster_file(tmp_path / "x.yaml")


@pytest.mark.parametrize("path", FILES[:2], ids=lambda path: path.stem)
def test_its_nodes_hold_what_the_application_asks_for(path: Path) -> None:
    """Otherwise the autoscaler would wait forever, and say so only in its log."""
    types = read_cluster_file(path)["available_node_types"]
    schema, _ = check_serve_file(APP)
    for deployment in schema.applications[0].deployments:
        options = deployment.ray_actor_options
        if not deployment.name.endswith("Pool"):
            assert options.resources == {"head": 0.1}
            assert types["head"]["resources"]["head"] >= 1
            continue
        asked = {"CPU": options.num_cpus, "GPU": options.num_gpus, **options.resources}
        holding = [
            name
            for name, kind in types.items()
            if all(kind["resources"].get(resource, 0) >= count for resource, count in asked.items())
        ]
        assert holding == [deployment.name.removesuffix("Pool").lower()]
        room = sum(
            types[name]["max_workers"] * min(types[name]["resources"][r] // n for r, n in asked.items())
            for name in holding
        )
        assert room >= deployment.num_replicas


@pytest.mark.parametrize("commands", ["head_start_ray_commands", "worker_start_ray_commands"])
@pytest.mark.parametrize(("failures", "code"), [(0, 0), (2, 0), (3, 1)])
def test_a_machine_of_ones_own_gets_three_tries(
    commands: str, failures: int, code: int, tmp_path: Path
) -> None:
    """Ray's autoscaler does not try it again. `ray` is a script here that fails `failures` times to start."""
    (tmp_path / "ray").write_text(
        f'echo "$1" >> {tmp_path}/log\n[ "$1" = stop ] || [ $(grep -c start {tmp_path}/log) -gt {failures} ]\n'
    )
    (tmp_path / "ray").chmod(0o700)
    last = read_cluster_file(FILES[2])[commands][-1].replace("ulimit -l unlimited", "true")
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RAY_HEAD_IP": "10.0.0.10"}
    done = subprocess.run(["bash", "-c", last], env=environment, capture_output=True, check=False)
    assert done.returncode == code, done.stderr
    assert (tmp_path / "log").read_text().count("start") == min(failures + 1, 3)


@pytest.mark.parametrize(
    ("content", "named"),
    [({}, "provider.type"), ({"provider": {"type": "moon"}, "cluster_name": "x"}, "moon")],
)
def test_what_is_no_cluster_file_is_refused(content: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=named):
        read_cluster_file(path)
