"""`baton bench`: load on any OpenAI endpoint, and its latency, throughput, SLO attainment and goodput."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baton.bench import report, workload
from baton.bench.client import Client, Record, closed_loop, open_loop
from baton.bench.measure import Summary, summarise
from baton.bench.traces import read_trace
from baton.bench.workload import Job
from core.errors import ConfigError


def bench(
    base_url: Annotated[str, typer.Option(help="The endpoint, without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Model name (default: the first that the endpoint lists).")] = "",
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")] = "",
    chat: Annotated[
        bool, typer.Option("--chat", help="Use /v1/chat/completions instead of /v1/completions.")
    ] = False,
    requests: Annotated[
        int, typer.Option("--requests", "-n", min=1, help="How many requests (of each rate).")
    ] = 100,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Closed loop: requests at a time (when no rate is given).")
    ] = 8,
    rates: Annotated[
        str, typer.Option("--rate", help="Open loop: requests per second; several by commas make a sweep.")
    ] = "",
    burstiness: Annotated[
        float, typer.Option(min=0.01, help="Squared variation of the gaps; 1 is Poisson.")
    ] = 1.0,
    input_tokens: Annotated[int, typer.Option(min=1, help="Synthetic prompts: mean length.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Output length.")] = 64,
    spread: Annotated[
        float, typer.Option(min=0, max=1, help="Synthetic lengths vary by this fraction.")
    ] = 0.0,
    prompts: Annotated[
        Path | None, typer.Option(help="File of prompts: a text or a JSON object in each line.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Trace file: Mooncake, ShareGPT, Azure or ServeGen; .gz too.")
    ] = None,
    time_scale: Annotated[
        float, typer.Option(min=0, help="Stretch (>1) or compress a trace's arrival times.")
    ] = 1.0,
    max_input_tokens: Annotated[int, typer.Option(min=1, help="Cut a trace's prompts to this.")] = 1_000_000,
    max_output_tokens: Annotated[int, typer.Option(min=1, help="Cut a trace's outputs to this.")] = 1_000_000,
    slo_ttft_ms: Annotated[float, typer.Option(help="Target for the time to first token.")] = 2000.0,
    slo_tpot_ms: Annotated[float, typer.Option(help="Target for the mean time per output token.")] = 100.0,
    temperature: Annotated[float, typer.Option(min=0, max=2)] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option(help="Generate the full output length (where the server knows how).")
    ] = True,
    warmup: Annotated[int, typer.Option(min=0, help="Requests sent first and not counted.")] = 2,
    timeout_s: Annotated[float, typer.Option(min=1)] = 600.0,
    seed: Annotated[int, typer.Option()] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (PNG) here.")] = None,
) -> None:
    """Measure an OpenAI endpoint: TTFT, ITL, TPOT, E2E, throughput, SLO attainment and goodput."""
    console = Console()
    name, vocab_size = _ask_endpoint(base_url, model, api_key, text_only=chat)
    rows = read_trace(trace, seed) if trace is not None else []

    def make_jobs(run: int) -> list[Job]:
        """Each run of a sweep gets prompts of its own where they are made up: it must not find the last one's prefixes cached."""
        if rows:
            return workload.from_trace(
                rows, requests, time_scale, max_input_tokens, max_output_tokens, vocab_size, seed + run
            )
        if prompts is not None:
            return workload.from_file(prompts, requests, output_tokens)
        return workload.synthetic(requests, input_tokens, output_tokens, spread, vocab_size, seed + run)

    extra: dict[str, Any] = {"temperature": temperature} | ({"ignore_eos": True} if ignore_eos else {})
    schedules = _schedules(make_jobs, rates, burstiness, seed, from_trace=trace is not None)
    client_arguments = (base_url, name, api_key, chat, timeout_s, extra)
    runs: list[list[Record]] = []
    for rate, timed in schedules:
        warm = make_jobs(len(schedules))[:warmup] if not runs else []
        runs.append(
            asyncio.run(_run(client_arguments, timed, warm, concurrency if rate is None else 0, console))
        )
    summaries = [
        summarise(records, slo_ttft_ms, slo_tpot_ms, rate or 0.0)
        for (rate, _), records in zip(schedules, runs, strict=True)
    ]
    _report(console, summaries, runs, json_file, plot, _parameters(locals()))
    if not any(summary.num_ok for summary in summaries):
        raise typer.Exit(1)


def _schedules(
    make_jobs: Callable[[int], list[Job]], rates: str, burstiness: float, seed: int, *, from_trace: bool
) -> list[tuple[float | None, list[Job]]]:
    """(offered rate, jobs with arrival times) for each run; the rate is None for a closed loop."""
    if rates:
        try:
            values = [float(text) for text in rates.split(",")]
        except ValueError:
            raise ConfigError(f"--rate takes numbers separated by commas, got {rates!r}") from None
        if min(values) <= 0:
            raise ConfigError(f"--rate must be positive, got {min(values):g}")
        return [(rate, _timed(make_jobs(run), rate, burstiness, seed)) for run, rate in enumerate(values)]
    jobs = make_jobs(0)
    if from_trace:
        last_s = max(job.arrival_s for job in jobs)
        return [(len(jobs) / last_s if last_s else 0.0, jobs)]
    return [(None, jobs)]


def _timed(jobs: Sequence[Job], rate: float, burstiness: float, seed: int) -> list[Job]:
    arrivals = workload.poisson_arrivals(len(jobs), rate, burstiness, seed)
    return [replace(job, arrival_s=at) for job, at in zip(jobs, arrivals, strict=True)]


async def _run(
    arguments: tuple[Any, ...], jobs: Sequence[Job], warm: Sequence[Job], concurrency: int, console: Console
) -> list[Record]:
    """The records; Ctrl-C ends the run early and keeps what was measured."""
    client = Client(*arguments)
    done: list[Record] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        await closed_loop(client, [replace(job, arrival_s=0.0) for job in warm], 4, lambda _: None)
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("requests", total=len(jobs))

            def count(record: Record) -> None:
                done.append(record)
                failed = sum(bool(r.error) for r in done)
                bar.update(
                    task, advance=1, description=f"requests ({failed} failed)" if failed else "requests"
                )

            run = (
                closed_loop(client, jobs, concurrency, count)
                if concurrency
                else open_loop(client, jobs, count)
            )
            await run
    except asyncio.CancelledError:
        console.print(f"interrupted: {len(done)} of {len(jobs)} requests were measured")
    finally:
        await client.close()
    return done


def _ask_endpoint(base_url: str, model: str, api_key: str, *, text_only: bool) -> tuple[str, int]:
    """The model's name, and how many token ids are safe to use as prompts (0: only text is)."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(base_url=base_url, headers=headers, timeout=10) as http:
            answer = http.get("/v1/models")
            answer.raise_for_status()
            name = model or answer.json()["data"][0]["id"]
            if text_only:
                return name, 0
            ids = http.post(
                "/tokenize", json={"model": name, "prompt": "a b c hello world, some text to tokenize"}
            )
            return name, max(ids.json()["tokens"]) if ids.status_code == 200 else 0
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        raise ConfigError(f"no OpenAI endpoint answers at {base_url}: {error}") from None


def _report(
    console: Console,
    summaries: list[Summary],
    runs: list[list[Record]],
    json_file: Path | None,
    plot: Path | None,
    parameters: dict[str, Any],
) -> None:
    report.print_table(console, summaries)
    if json_file is not None:
        report.write_json(json_file, summaries, parameters)
        console.print(f"figures: {json_file}")
    if plot is not None:
        report.draw(plot, summaries, runs)
        console.print(f"picture: {plot}")


def _parameters(given: dict[str, Any]) -> dict[str, Any]:
    names = (
        "model", "chat", "requests", "concurrency", "rates", "burstiness", "input_tokens", "output_tokens", "spread", "prompts",
        "trace", "time_scale", "max_input_tokens", "max_output_tokens", "temperature", "ignore_eos", "warmup", "seed",
    )  # fmt: skip
    return {name: str(value) if isinstance(value := given[name], Path) else value for name in names}
