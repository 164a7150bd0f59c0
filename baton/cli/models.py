"""`baton models`: which models a server has, their sleep, and what each can do, from any of its ingresses."""

from typing import Annotated, Literal

import httpx
import typer
from rich.console import Console

from baton.cli.model_list import answer_of, listed, shown
from core.errors import ConfigError

_LONGEST_S = 3600.0
"""A model's sequences may be finished first (`--timeout`)."""


def models(
    action: Annotated[
        Literal["list", "show", "sleep", "wake"],
        typer.Argument(help="`show`, `sleep` and `wake` take a name."),
    ] = "list",
    name: Annotated[str, typer.Argument(help="The model. Empty: the only one, or the first.")] = "",
    level: Annotated[
        int, typer.Option(min=1, max=2, help="1: weights stay in host memory. 2: they are on disk only.")
    ] = 1,
    pause: Annotated[
        bool, typer.Option("--pause", help="Sequences that run stop now, and go on after waking.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds for which others are finished.")] = 60.0,
    base_url: Annotated[
        str, typer.Option(envvar="OPENAI_BASE_URL", help="An ingress; /v1 may be left out.")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", help="One with the scope operator for sleep and wake.")
    ] = "",
) -> None:
    """List a server's models with their states, show one, have it sleep, or wake it. Returns when it is so."""
    if (action == "show" and not name) or (action == "list" and name):
        raise typer.BadParameter("give `list` alone, or `show` and a name", param_hint="ACTION")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base = base_url.rstrip("/").removesuffix("/v1")
    asked = {"model": name} if name else {}
    sleep = {"level": level, "mode": "keep" if pause else "wait", "timeout": timeout}
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=_LONGEST_S) as http:
            if action == "sleep":
                answer_of(http.post("/sleep", params={**asked, **sleep}))
            elif action == "wake":
                answer_of(http.post("/wake_up", params=asked))
            table = shown(http, name) if action == "show" else listed(http)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{base_url} is no URL: {error}") from None
    except httpx.HTTPError as error:
        raise ConfigError(f"no ingress answers at {base}: {error}") from None
    Console(highlight=False).print(table)
