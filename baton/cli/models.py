"""`baton models`: which models a server has, their sleep, and what each can do; and which models are on this host's disk."""

from typing import Annotated, Any, Literal

import httpx
import typer
from rich.console import Console
from rich.table import Table

from baton.cli.model_cache import cached, pull, remove
from baton.cli.model_list import answer_of, listed, shown
from core.errors import ConfigError

_LONGEST_S = 3600.0
"""A model's sequences may be finished first (`--timeout`)."""


def models(
    action: Annotated[
        Literal["list", "show", "sleep", "wake", "pull", "rm", "cached"],
        typer.Argument(help="`pull`, `rm` and `cached` are of this host's disk, the others of a server."),
    ] = "list",
    name: Annotated[str, typer.Argument(help="The model. Empty: the only one, or the first.")] = "",
    level: Annotated[
        int, typer.Option(min=1, max=2, help="1: weights stay in host memory. 2: they are on disk only.")
    ] = 1,
    pause: Annotated[
        bool, typer.Option("--pause", help="Sequences that run stop now, and go on after waking.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds for which others are finished.")] = 60.0,
    sha256: Annotated[str, typer.Option(help="The digest of the file that a URL names.")] = "",
    max_bytes: Annotated[
        str, typer.Option(envvar="BATON_CACHE_BYTES", help="What pulled models may take, such as 500G.")
    ] = "",
    base_url: Annotated[
        str, typer.Option(envvar="OPENAI_BASE_URL", help="An ingress; /v1 may be left out.")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", help="One with the scope operator for sleep and wake.")
    ] = "",
) -> None:
    """List a server's models with their states, show one, have it sleep, or wake it. Returns when it is so.

    `pull` fetches a model to this host's disk, `rm` removes it from there, and `cached` lists what is there."""
    _check(action, name)
    if action == "pull":
        pull(name, sha256=sha256, max_bytes=max_bytes)
    elif action == "rm":
        remove(name)
    elif action == "cached":
        Console(highlight=False).print(cached())
    else:
        sleep = {"level": level, "mode": "keep" if pause else "wait", "timeout": timeout}
        Console(highlight=False).print(_asked(action, name, sleep, base_url, api_key))


def _check(action: str, name: str) -> None:
    if action in ("show", "pull", "rm") and not name:
        raise typer.BadParameter(f"`{action}` takes a name", param_hint="ACTION")
    if action in ("list", "cached") and name:
        raise typer.BadParameter(f"`{action}` takes no name", param_hint="ACTION")


def _asked(action: str, name: str, sleep: dict[str, Any], base_url: str, api_key: str) -> Table:
    """Ask a server, and return what it says. Raises ConfigError."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base = base_url.rstrip("/").removesuffix("/v1")
    asked = {"model": name} if name else {}
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=_LONGEST_S) as http:
            if action == "sleep":
                answer_of(http.post("/sleep", params={**asked, **sleep}))
            elif action == "wake":
                answer_of(http.post("/wake_up", params=asked))
            return shown(http, name) if action == "show" else listed(http)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{base_url} is no URL: {error}") from None
    except httpx.HTTPError as error:
        raise ConfigError(f"no ingress answers at {base}: {error}") from None
