"""`baton rollout`: replace the processes of a running application, pool after pool, while it serves."""

import secrets
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.cli.deploy import DASHBOARD
from baton.cli.ray_program import run_ray

console = Console(stderr=True, highlight=False)


def rollout(
    app: Annotated[str, typer.Option(help="The application's name.")] = "baton",
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Of PrefillPool, DecodePool, Scheduler and Ingress these alone, or DecodePool-NAME of one model. Repeatable."
        ),
    ] = None,
    address: Annotated[
        str, typer.Option(envvar="RAY_DASHBOARD_ADDRESS", help="The Ray cluster's dashboard.")
    ] = DASHBOARD,
    cluster: Annotated[
        Path | None, typer.Option(help="From the head of this `baton up` cluster instead.")
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=1, help="How long one pool may take.")] = 1800.0,
) -> None:
    """Restart prefill, decode, scheduler and ingress in turn, so that they run what their nodes have now. Nothing is lost."""
    from cluster.deploy.deployment_names import kind_and_suffix  # noqa: PLC0415 (seconds, which --help does not need)
    from cluster.deploy.rollout import ORDER  # noqa: PLC0415 (seconds, which --help does not need)
    from cluster.deploy.rollout import rollout as roll  # noqa: PLC0415 (seconds, which --help does not need)
    from cluster.deploy.serve_rest import ServeRest  # noqa: PLC0415 (seconds, which --help does not need)

    asked = only or ORDER
    if unknown := [name for name in asked if kind_and_suffix(name)[0] not in ORDER]:
        raise typer.BadParameter(f"{min(unknown)}: one of {', '.join(ORDER)}", param_hint="--only")
    chosen = tuple(sorted(asked, key=lambda name: ORDER.index(kind_and_suffix(name)[0])))
    if cluster is not None:
        options = "".join(f" --only {name}" for name in chosen)
        run_ray("exec", str(cluster), f"baton rollout --app {app}{options} --timeout-s {timeout_s:g}")
        return
    roll(
        ServeRest(address),
        app,
        chosen,
        secrets.token_hex(4),
        timeout_s,
        lambda line: console.print(f"  {line}"),
    )
    console.print(f"[green]{app} runs on new processes.[/]")
