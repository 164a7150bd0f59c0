"""`baton deploy`: check a Serve file strictly, send it to a running Ray cluster, and follow it until it serves."""

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.cli.ray_program import run_ray
from baton.cli.yaml_file import read_yaml

console = Console(stderr=True, highlight=False)
DASHBOARD = "http://127.0.0.1:8265"


def deploy(
    file: Annotated[Path, typer.Argument(help="Serve's YAML with Baton in it (examples/serve/baton.yaml).")],
    address: Annotated[
        str, typer.Option(envvar="RAY_DASHBOARD_ADDRESS", help="The Ray cluster's dashboard.")
    ] = DASHBOARD,
    cluster: Annotated[
        Path | None, typer.Option(help="Deploy from the head of this `baton up` cluster instead.")
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=1, help="How long to wait until everything runs.")] = 600.0,
) -> None:
    """Deploy, or upgrade what runs: replicas are replaced a few at a time, and each finishes or moves what it has first."""
    from cluster.deploy.rollout import with_stamps  # noqa: PLC0415 (seconds, which --help does not need)
    from cluster.deploy.serve_file import check_serve_file  # noqa: PLC0415 (seconds, which --help does not need)
    from cluster.deploy.serve_rest import ServeRest  # noqa: PLC0415 (seconds, which --help does not need)

    schema, configs = check_serve_file(read_yaml(file))
    if cluster is not None:
        remote = f"/tmp/baton-deploy-{file.name}"
        run_ray("rsync-up", str(cluster), str(file), remote)
        run_ray("exec", str(cluster), f"baton deploy {shlex.quote(remote)} --timeout-s {timeout_s:g}")
        return
    rest = ServeRest(address)
    rest.deploy(with_stamps(schema, rest.details()))
    rest.wait(list(configs), timeout_s, lambda line: console.print(f"  {line}"))
    for name, config in configs.items():
        console.print(
            f"[green]{name} runs.[/] OpenAI endpoint: port {config.serve.port} of the nodes with an ingress"
        )
