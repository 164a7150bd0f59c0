"""`baton top`: a running cluster in the terminal, once a second, from any of its ingresses."""

import time
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from baton.cli.fitted_table import Column, FittedTable
from core.errors import ConfigError

_BAR_CELLS = 12


def top(
    base_url: Annotated[
        str, typer.Option(envvar="OPENAI_BASE_URL", help="An ingress; /v1 may be left out.")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")] = "",
    model: Annotated[
        str, typer.Option(help="Which of several models; default: the first that answers.")
    ] = "",
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one look and end.")] = False,
) -> None:
    """Watch instances, queues, links and SLO attainment. Ctrl-C ends it."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base, console = base_url.rstrip("/").removesuffix("/v1"), Console(highlight=False)
    try:
        asked = {"model": model} if model else {}
        with httpx.Client(base_url=base, headers=headers, params=asked, timeout=5) as http:
            first = view(_look(http))
            if once or not console.is_terminal:
                console.print(first)
                return
            with Live(first, console=console, screen=True, auto_refresh=False) as live:
                while True:
                    time.sleep(interval)
                    live.update(_next(http), refresh=True)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{base_url} is no URL: {error}") from None
    except httpx.HTTPError as error:
        raise ConfigError(f"no ingress answers at {base}: {error}") from None
    except KeyboardInterrupt:
        return


def _look(http: httpx.Client) -> dict[str, Any]:
    """Ask the cluster. Raises ConfigError, httpx.HTTPError."""
    answer = http.get("/cluster")
    if answer.status_code == 401:
        raise ConfigError(f"{http.base_url} asks for an API key: --api-key")
    if answer.status_code == 404 and http.params:
        raise ConfigError(answer.json()["error"]["message"])
    answer.raise_for_status()
    return answer.json()


def _next(http: httpx.Client) -> RenderableType:
    """Return the next view. A server that does not answer for a while is shown so, and watched on."""
    try:
        return view(_look(http))
    except httpx.HTTPError as error:
        return Text(f"{http.base_url} does not answer: {error or type(error).__name__}", style="red")


def view(status: dict[str, Any]) -> Group:
    """Return the answer of /cluster as tables."""
    state = (
        f"[red]not accepting: {escape(status['why_not'])}[/]" if status["why_not"] else "[green]accepting[/]"
    )
    head = f"[bold]Baton[/] {escape(status['model'])}   {state}   {status['num_queued']} waiting for a place"
    models = [_models(status["models"])] if "models" in status else []
    return Group(
        Text.from_markup(head),
        *models,
        _classes(status["classes"]),
        _instances(status["instances"], status["sleepers"]),
        _links(status["links"]),
    )


def _models(models: list[dict[str, Any]]) -> FittedTable:
    counts = Column("instances", 1), Column("running", 2), Column("waiting for a place")
    table = FittedTable("models", [_word("model"), _word("state"), *counts])
    for m in models:
        state = f"[red]{escape(m['why_not'])}[/]" if m["why_not"] else "[green]serving[/]"
        numbers = [str(m.get(name, "-")) for name in ("num_instances", "num_running", "num_queued")]
        table.add(escape(m["model"]), state, *numbers)
    return table


def _classes(classes: list[dict[str, Any]]) -> FittedTable:
    times = [
        Column(f"{what} {which}", goes)
        for what, least in (("TTFT", 1), ("TPOT", 2))
        for which, goes in (("p50", 2 + least), ("p99", 0), ("target", 4 + least))
    ]
    columns = [_word("class"), _word("attainment"), Column("requests/s", 2), *times, Column("tokens/s", 1)]
    table = FittedTable("service classes, last minute at this ingress", columns)
    for c in classes:
        figures = [_time(c[name]) for name in ("ttft_p50_s", "ttft_p99_s", "ttft_target_s")]
        figures += [_time(c[name]) for name in ("tpot_p50_s", "tpot_p99_s", "tpot_target_s")]
        share = _bar(
            c["attainment"],
            "green" if c["attainment"] >= 0.99 else "yellow" if c["attainment"] >= 0.9 else "red",
        )
        rates = f"{c['requests_per_s']:.2f}", f"{c['output_tokens_per_s']:.1f}"
        table.add(escape(c["name"]), share, rates[0], *figures, rates[1])
    return table


def _instances(instances: list[dict[str, Any]], sleepers: list[dict[str, Any]]) -> FittedTable:
    figures = Column("running"), Column("waiting", 1), Column("prompt tokens", 4), Column("step", 2)
    words = [_word(name) for name in ("role", "address", "state", "KV in use")]
    table = FittedTable("instances", [*words, *figures, Column("prefix hits", 3)])
    for i in instances:
        state = (
            "[red]broken accounting[/]"
            if i["defect"]
            else "[yellow]draining[/]"
            if i["leaving"]
            else "[green]serving[/]"
        )
        used = 1 - i["free_blocks"] / i["num_blocks"] if i["num_blocks"] else 0.0
        work = i["work"]
        asked = work["prefix_queried_tokens"]
        hits = f"{work['prefix_hit_tokens'] / asked:.0%}" if asked else "-"
        counts = [str(i[name]) for name in ("num_running", "num_waiting", "queued_tokens")]
        bar = _bar(used, "red" if used > 0.95 else "blue")
        table.add(_role(i), escape(i["address"]), state, bar, *counts, _time(i["step_s"]), hits)
    for one in sleepers:
        state = f"[dim]{one['state']}, level {one['level']}[/]"
        table.add(_role(one), escape(one["address"]), state, f"[dim]wakes in {_time(one['wake_s'])}[/]")
    return table


def _role(instance: dict[str, Any]) -> str:
    if instance["prefills"] and instance["decodes"]:
        return "both"
    return "prefill" if instance["prefills"] else "decode"


def _links(links: list[dict[str, Any]]) -> FittedTable:
    words = [_word(name) for name in ("from", "to", "by")]
    figures = Column("MB/s"), Column("hand-overs/s", 1), Column("exposed p50")
    table = FittedTable("links, last minute at this ingress", [*words, *figures])
    for link in links:
        ends = [escape(link[name]) for name in ("source", "target", "transport")]
        rates = (f"{link['bytes_per_s'] / 1e6:.2f}", f"{link['transfers_per_s']:.2f}")
        table.add(*ends, *rates, _time(link["exposed_p50_s"]))
    return table


def _word(name: str) -> Column:
    return Column(name, is_figure=False)


def _bar(share: float, colour: str) -> Text:
    full = round(share * _BAR_CELLS)
    return Text.assemble(("━" * full, colour), ("━" * (_BAR_CELLS - full), "grey37"), f" {share:4.0%}")


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds * 1000:.{1 if seconds < 0.01 else 0}f} ms"
