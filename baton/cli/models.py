"""`baton models`: which models a server has, and what each can do, from any of its ingresses."""

from typing import Annotated

import httpx
import typer
from rich.console import Console

from baton.cli.model_list import listed, shown
from core.errors import ConfigError


def models(
    action: Annotated[str, typer.Argument(help="`list`, or `show` and a name.")] = "list",
    name: Annotated[str, typer.Argument(help="The model to show.")] = "",
    base_url: Annotated[
        str, typer.Option(envvar="OPENAI_BASE_URL", help="An ingress; /v1 may be left out.")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")] = "",
) -> None:
    """List a server's models with their states, or show one."""
    if action not in ("list", "show") or (action == "show") != bool(name):
        raise typer.BadParameter("give `list`, or `show` and a name", param_hint="ACTION")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base = base_url.rstrip("/").removesuffix("/v1")
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=10) as http:
            table = shown(http, name) if name else listed(http)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{base_url} is no URL: {error}") from None
    except httpx.HTTPError as error:
        raise ConfigError(f"no ingress answers at {base}: {error}") from None
    Console(highlight=False).print(table)
