"""`baton bench`: load on any OpenAI endpoint, and its latency, throughput, SLO attainment and goodput."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baton.bench import bench_report, bench_workload
from baton.bench.bench_workload import BenchRequest
from baton.bench.client import Client, Record, closed_loop, open_loop
from baton.bench.measure import Summary, percentiles, summarise, ttft_s
from baton.bench.traces import RateWindow, TraceRow, read_rate_curve, read_trace
from baton.cli.output_files import check_picture, check_writable
from core.errors import ConfigError

_ORDINARY = "a b c hello world, some text to tokenize"
_SMALLEST_VOCAB = 64
_LATELY = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """The requests of each run: a trace's rows, a file's prompts or synthetic ones, and when they arrive."""

    prompts: Path | None
    rows: Sequence[TraceRow] | None
    curve: Sequence[RateWindow] | None
    input_tokens: int
    output_tokens: int
    spread: float
    time_scale: float
    max_input_tokens: int
    max_output_tokens: int
    burstiness: float
    vocab_size: int
    seed: int

    def jobs_of(self, run: int, count: int) -> list[BenchRequest]:
        """Return the jobs of a run. Another run number gives other contents."""
        if self.rows is not None:
            return bench_workload.from_trace(
                self.rows,
                count,
                self.time_scale,
                self.max_input_tokens,
                max_output=self.max_output_tokens,
                vocab_size=self.vocab_size,
                seed=self.seed,
                run=run,
            )
        if self.prompts is not None:
            return bench_workload.from_file(self.prompts, count, self.output_tokens, run)
        return bench_workload.synthetic(
            count,
            self.input_tokens,
            self.output_tokens,
            self.spread,
            vocab_size=self.vocab_size,
            seed=self.seed,
            run=run,
        )

    def timed(self, jobs: list[BenchRequest], rate: float | None) -> list[BenchRequest]:
        """Return the jobs with their arrival times: those of `rate`, of the curve, or their own."""
        if rate is not None:
            return _arriving(
                jobs, bench_workload.poisson_arrivals(len(jobs), rate, self.burstiness, self.seed)
            )
        if self.curve is not None:
            times = bench_workload.curve_arrivals(self.curve, len(jobs), self.seed)
            return _arriving(jobs, [at * self.time_scale for at in times])
        return jobs


def bench(
    base_url: Annotated[
        str, typer.Option(help="The endpoint; /v1 may be left out.")
    ] = "http://127.0.0.1:8000",
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
    rate_curve: Annotated[
        Path | None, typer.Option(help="ServeGen's rate curves: spread the requests over one of them.")
    ] = None,
    pool: Annotated[str, typer.Option(help="Which curve (default: the file's first).")] = "",
    time_scale: Annotated[
        float,
        typer.Option(min=0, help="Stretch (>1) or compress the arrival times of a trace or rate curve."),
    ] = 1.0,
    max_input_tokens: Annotated[int, typer.Option(min=1, help="Cut a trace's prompts to this.")] = 1_000_000,
    max_output_tokens: Annotated[int, typer.Option(min=1, help="Cut a trace's outputs to this.")] = 1_000_000,
    slo_ttft_ms: Annotated[float, typer.Option(help="Target for the time to first token.")] = 2000.0,
    slo_tpot_ms: Annotated[float, typer.Option(help="Target for the mean time per output token.")] = 100.0,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="Sampling temperature.")] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for the full output length; use --no-ignore-eos where it is refused.")
    ] = True,
    warmup: Annotated[int, typer.Option(min=0, help="Requests sent first and not counted.")] = 2,
    timeout_s: Annotated[float, typer.Option(min=1, help="Give one request up after this.")] = 600.0,
    seed: Annotated[
        int, typer.Option(help="The same seed sends the same prompts: a running server may have them cached.")
    ] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (PNG) here.")] = None,
) -> None:
    """Measure an OpenAI endpoint: TTFT, ITL, TPOT, E2E, throughput, SLO attainment and goodput."""
    console = Console()
    check_writable(json_file)
    check_picture(plot)
    offered = _rates(rates)
    rows = read_trace(trace, seed) if trace is not None else None
    curve = read_rate_curve(rate_curve, pool) if rate_curve is not None else None
    base_url = base_url.rstrip("/").removesuffix("/v1")
    model, vocab_size = _ask_endpoint(base_url, model, api_key, text_only=chat)

    load = _Load(
        prompts=prompts,
        rows=rows,
        curve=curve,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        spread=spread,
        time_scale=time_scale,
        max_input_tokens=max_input_tokens,
        max_output_tokens=max_output_tokens,
        burstiness=burstiness,
        vocab_size=vocab_size,
        seed=seed,
    )
    extra: dict[str, Any] = {"temperature": temperature} | ({"ignore_eos": True} if ignore_eos else {})
    closed = not offered and rows is None and curve is None
    make_client = partial(Client, base_url, model, api_key, timeout_s, extra, chat=chat)
    runs: list[list[Record]] = []
    summaries: list[Summary] = []
    for run, rate in enumerate(offered or [None]):
        jobs = load.timed(load.jobs_of(run, requests), rate)
        warm = load.jobs_of(bench_workload.WARMUP_RUN, warmup) if run == 0 else []
        records = asyncio.run(_run(make_client, jobs, warm, concurrency if closed else 0, console))
        if records:
            runs.append(records)
            summaries.append(summarise(records, slo_ttft_ms, slo_tpot_ms, rate or _mean_rate(jobs)))
        if len(records) < len(jobs):
            break
    if summaries:
        _report(console, summaries, runs, json_file, plot, _parameters(locals()))
    if not any(summary.num_ok for summary in summaries):
        raise typer.Exit(1)


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")] if text else []
    except ValueError:
        raise ConfigError(f"--rate takes numbers separated by commas, got {text!r}") from None
    if not all(0 < rate < math.inf for rate in rates):
        raise ConfigError(f"--rate must be positive, got {text}")
    return rates


def _arriving(jobs: Sequence[BenchRequest], arrivals: Sequence[float]) -> list[BenchRequest]:
    return [replace(job, arrival_at=at) for job, at in zip(jobs, arrivals, strict=True)]


def _mean_rate(jobs: Sequence[BenchRequest]) -> float:
    """Return the requests per second of an open loop without `--rate`; 0 in a closed one."""
    last_at = max(job.arrival_at for job in jobs)
    return len(jobs) / last_at if last_at else 0.0


async def _run(
    make_client: Callable[[], Client],
    jobs: Sequence[BenchRequest],
    warm: Sequence[BenchRequest],
    concurrency: int,
    console: Console,
) -> list[Record]:
    """Run, and return the records. Ctrl-C ends the run early and keeps what was measured."""
    client = make_client()
    done: list[Record] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        await closed_loop(client, [replace(job, arrival_at=0.0) for job in warm], 4, lambda _: None)
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("requests", total=len(jobs))

            def count(record: Record) -> None:
                done.append(record)
                bar.update(task, advance=1, description=_progress(done))

            run = (
                closed_loop(client, jobs, concurrency, count)
                if concurrency
                else open_loop(client, jobs, count)
            )
            await run
    except asyncio.CancelledError:
        console.print(
            f"interrupted: the figures are those of the {len(done)} of {len(jobs)} requests that had ended"
        )
    finally:
        await client.close()
    return done


def _progress(done: Sequence[Record]) -> str:
    """Return a line: the failures so far, and the time to first token lately."""
    failed = sum(bool(record.error) for record in done[-_LATELY:])
    ttft_ms = percentiles([ttft_s(record) * 1e3 for record in done[-_LATELY:] if not record.error])
    recent = f"TTFT p50 {ttft_ms['p50']:.0f} ms" if ttft_ms else "no answer"
    return f"requests (lately {recent}, {failed} failed)"


def _ask_endpoint(base_url: str, model: str, api_key: str, *, text_only: bool) -> tuple[str, int]:
    """Return the model's name, and how many token ids are safe to use as prompts (0 where only text is)."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(base_url=base_url, headers=headers, timeout=10) as http:
            answer = http.get("/v1/models")
            answer.raise_for_status()
            name = model or str(answer.json()["data"][0]["id"])
            return name, 0 if text_only else _vocab_size(http, name)
    except httpx.HTTPStatusError as error:
        raise ConfigError(
            f"{base_url}/v1/models answers {error.response.status_code}: is --api-key right?"
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"no OpenAI endpoint answers at {base_url}: {error}") from None
    except (LookupError, ValueError, TypeError) as error:
        raise ConfigError(f"{base_url}/v1/models lists no model: {error}") from None


def _vocab_size(http: httpx.Client, model: str) -> int:
    """Return a number of token ids that are safe: those below the largest of an ordinary text are in every vocabulary's plain
    part."""
    answer = http.post("/tokenize", json={"model": model, "prompt": _ORDINARY})
    if answer.status_code != 200:
        return 0
    try:
        largest = max(answer.json()["tokens"])
    except (LookupError, ValueError, TypeError):
        return 0
    return largest if isinstance(largest, int) and largest >= _SMALLEST_VOCAB else 0


def _report(
    console: Console,
    summaries: list[Summary],
    runs: list[list[Record]],
    json_file: Path | None,
    plot: Path | None,
    parameters: dict[str, Any],
) -> None:
    bench_report.print_table(console, summaries)
    bench_report.print_first_error(console, runs)
    if json_file is not None:
        bench_report.write_json(json_file, summaries, parameters)
        console.print(f"figures: {json_file}")
    if plot is not None:
        from baton.bench.pictures import draw  # noqa: PLC0415 (seconds, which --help does not need)

        draw(plot, summaries, runs)
        console.print(f"picture: {plot}")


def _parameters(given: dict[str, Any]) -> dict[str, Any]:
    names = (
        "model", "chat", "requests", "concurrency", "rates", "burstiness", "input_tokens", "output_tokens", "spread",
        "prompts", "trace", "rate_curve", "pool", "time_scale", "max_input_tokens", "max_output_tokens", "temperature",
        "ignore_eos", "warmup", "seed",
    )  # fmt: skip
    return {name: str(value) if isinstance(value := given[name], Path) else value for name in names}
