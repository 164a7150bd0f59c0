"""`baton models`: which models a server has, and what each can do, from any of its ingresses."""

from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

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
            table = _shown(http, name) if name else _listed(_answer(http.get("/v1/models"))["data"])
    except httpx.InvalidURL as error:
        raise ConfigError(f"{base_url} is no URL: {error}") from None
    except httpx.HTTPError as error:
        raise ConfigError(f"no ingress answers at {base}: {error}") from None
    Console(highlight=False).print(table)


def _answer(response: httpx.Response) -> Any:
    """Return the answer's JSON. Raises ConfigError, with the server's own words."""
    if response.is_success:
        return response.json()
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        response.raise_for_status()
        raise ConfigError(f"{response.url} answers {response.status_code}") from None
    raise ConfigError(error if isinstance(error, str) else error["message"])


def _listed(entries: list[dict[str, Any]]) -> Table:
    table = Table("name", "state", "of", "context", "can", box=None, pad_edge=False)
    for entry in entries:
        own = entry["baton"]
        colour = "green" if own["state"] == "serving" else "red"
        of = "" if entry["root"] == entry["id"] else entry["parent"] or entry["root"]
        cells = [escape(of), str(entry["max_model_len"]), ", ".join(own["capabilities"])]
        table.add_row(escape(entry["id"]), f"[{colour}]{own['state']}[/]", *cells)
    return table


def _shown(http: httpx.Client, name: str) -> Table:
    entry = _answer(http.get(f"/v1/models/{name}"))
    facts = _answer(http.post("/api/show", json={"model": name}))
    details, table = facts["details"], Table(box=None, show_header=False, pad_edge=False)
    lines = {
        "name": name,
        "of": entry["parent"] or entry["root"],
        "state": entry["baton"]["state"],
        "can": ", ".join(entry["baton"]["capabilities"]),
        "context": f"{entry['max_model_len']} tokens",
        "family": details["family"],
        "weights": " ".join(filter(None, (details["parameter_size"], details["quantization_level"]))),
        "sampling": ", ".join(" ".join(line.split()) for line in facts["parameters"].splitlines()),
    }
    for what, text in lines.items():
        table.add_row(what, escape(text))
    return table
