"""A server's models as tables, from what any of its ingresses says."""

from typing import Any

import httpx
from rich.markup import escape
from rich.table import Table

from core.errors import ConfigError


def listed(http: httpx.Client) -> Table:
    """Return all names with their states. Raises ConfigError and httpx.HTTPError."""
    entries: list[dict[str, Any]] = answer_of(http.get("/v1/models"))["data"]
    table = Table("name", "state", "of", "context", "can", box=None, pad_edge=False)
    for entry in entries:
        own = entry["baton"]
        colour = {"serving": "green", "asleep": "yellow"}.get(own["state"], "red")
        of = "" if entry["root"] == entry["id"] else entry["parent"] or entry["root"]
        cells = [escape(of), str(entry["max_model_len"]), ", ".join(own["capabilities"])]
        table.add_row(escape(entry["id"]), f"[{colour}]{own['state']}[/]", *cells)
    return table


def shown(http: httpx.Client, name: str) -> Table:
    """Return what there is to know of one model. Raises ConfigError and httpx.HTTPError."""
    entry = answer_of(http.get(f"/v1/models/{name}"))
    facts = answer_of(http.post("/api/show", json={"model": name}))
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


def answer_of(response: httpx.Response) -> Any:
    """Return the answer's JSON. Raises ConfigError, with the server's own words."""
    if response.is_success:
        return response.json()
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        response.raise_for_status()
        raise ConfigError(f"{response.url} answers {response.status_code}") from None
    raise ConfigError(error if isinstance(error, str) else error["message"])
