"""`baton up`, `down` and `status`: Ray's cluster launcher with what it leaves to its users done or said."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from baton.cli.deploy import DASHBOARD
from baton.cli.ray_program import run_ray
from baton.cli.yaml_file import read_yaml
from core.errors import ConfigError

console = Console(stderr=True, highlight=False)
_ClusterFile = Annotated[
    Path, typer.Argument(help="Ray's cluster file (examples/ray-up: aws, gcp, on-premises).")
]


def up(file: _ClusterFile) -> None:
    """Start (or update) the nodes of a cluster file; the autoscaler adds more when pools ask for them. Then: `baton deploy`."""
    config = read_cluster_file(file)
    _check_mounts(config)
    workers = config["provider"].get("worker_ips")
    console.print(f"[bold]{config['cluster_name']}[/] on {config['provider']['type']}: starting the head ...")
    run_ray("up", "--yes", "--no-config-cache", str(file), provider=config["provider"]["type"])
    console.print("[green]The head is up.[/] " + (f"{len(workers)} workers follow." if workers else ""))
    console.print(f"  baton status --cluster {file}\n  baton deploy app.yaml --cluster {file}", markup=False)


def down(file: _ClusterFile) -> None:
    """Drain what serves, then end all nodes of a cluster file."""
    config = read_cluster_file(file)
    if run_ray("exec", str(file), "command -v ray", quiet=True, check=False):
        raise ConfigError(
            f"cannot run ray on the head of {config['cluster_name']}: nothing would be stopped. Is it on the PATH there?"
        )
    console.print("running requests finish first ...")
    run_ray("exec", str(file), "serve shutdown --yes", check=False)
    run_ray("down", "--yes", str(file))
    console.print(f"[green]{config['cluster_name']} is down.[/]")


def status(
    address: Annotated[
        str, typer.Option(envvar="RAY_DASHBOARD_ADDRESS", help="The Ray cluster's dashboard.")
    ] = DASHBOARD,
    cluster: Annotated[
        Path | None, typer.Option(help="Ask at the head of this `baton up` cluster instead.")
    ] = None,
) -> None:
    """What runs, and what does not. Exit status 1 unless every application runs."""
    if cluster is not None:
        read_cluster_file(cluster)
        sys.exit(run_ray("exec", str(cluster), "ray status; baton status", check=False))
    from cluster.deploy.serve_rest import ServeRest, summarize  # noqa: PLC0415 (seconds, which --help does not need)

    applications = ServeRest(address).applications()
    if not applications:
        console.print("no application is deployed: baton deploy app.yaml")
    for name, app in applications.items():
        console.print(f"[bold]{name}[/] {app['status']}: {summarize({name: app})}")
        for lines in (
            app["message"].splitlines(),
            *(d["message"].splitlines() for d in app["deployments"].values()),
        ):
            if lines and app["status"] != "RUNNING":
                console.print(f"  {lines[-1].strip()}", markup=False)
    sys.exit(0 if applications and all(app["status"] == "RUNNING" for app in applications.values()) else 1)


def read_cluster_file(path: Path) -> dict[str, Any]:
    """Return the file as Ray would complete it. Raises ConfigError where Ray's own schema refuses it."""
    import jsonschema  # noqa: PLC0415 (seconds, which --help does not need)
    from ray.autoscaler._private.util import prepare_config, validate_config  # noqa: PLC0415 (seconds, which --help does not need)

    config = read_yaml(path)
    if not isinstance(config.get("provider"), Mapping) or "type" not in config["provider"]:
        raise ConfigError(f"{path}: provider.type is missing: aws, gcp, local, ...")
    try:
        prepared = prepare_config(config)
        validate_config(prepared)
    except jsonschema.ValidationError as error:
        where = ".".join(str(part) for part in error.absolute_path)
        raise ConfigError(f"{path}: {where or 'the file'}: {error.message}") from None
    except (ValueError, RuntimeError, KeyError, ImportError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    return prepared


def _check_mounts(config: Mapping[str, Any]) -> None:
    for remote, local in config.get("file_mounts", {}).items():
        if not Path(local).expanduser().exists():
            hint = ": ray get-auth-token --generate makes it" if remote.endswith("auth_token") else ""
            raise ConfigError(f"file_mounts: there is no {local} to copy to {remote}{hint}")
