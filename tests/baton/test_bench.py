"""The benchmark's figures against a server whose delays are known, its arithmetic on made-up records, and every trace format."""

import asyncio
import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse

from baton.bench.bench_report import write_json
from baton.bench.bench_workload import BenchRequest, curve_arrivals, from_trace, poisson_arrivals, synthetic
from baton.bench.client import Client, Record, closed_loop, open_loop
from baton.bench.measure import goodput, percentiles, summarise
from baton.bench.pictures import draw
from baton.bench.sse import SseReader
from baton.bench.traces import RateWindow, read_rate_curve, read_trace
from cluster.ingress.http.http_server import HttpServer
from core.errors import ConfigError
from tests.patience import until

SHARED = Path(__file__).parents[3] / "shared" / "traces"


def slow_server(first_s: float, gap_s: float, tokens: int, least: int = 0) -> FastAPI:
    """It answers nobody before it has been asked `least` times."""
    app = FastAPI()
    seen: list[Any] = []
    app.state.seen = seen

    @app.post("/v1/completions", response_model=None)
    async def completions(body: dict[str, Any]) -> StreamingResponse | JSONResponse:
        seen.append(body)
        if body["prompt"] == "refuse":
            return JSONResponse({"error": {}}, 429)

        async def events():
            await until(lambda: len(seen) >= least)
            await asyncio.sleep(first_s)
            for _ in range(tokens):
                yield f"data: {json.dumps({'choices': [{'text': 'x'}]})}\n\n"
                await asyncio.sleep(gap_s)
            usage = {"prompt_tokens": 3, "completion_tokens": tokens}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"

        return StreamingResponse(events())

    return app


async def run(app: FastAPI, jobs: list[BenchRequest], concurrency: int = 0) -> list[Record]:
    server = HttpServer(app, "127.0.0.1", [0], shared=False)
    port = server.port
    server.start()
    client = Client(f"http://127.0.0.1:{port}", "m", "", 30, {}, chat=False)
    try:
        if concurrency:
            return await closed_loop(client, jobs, concurrency, lambda _: None)
        return await open_loop(client, jobs, lambda _: None)
    finally:
        await client.close()
        await server.stop()


async def test_measured_times_are_the_servers_delays() -> None:
    records = await run(slow_server(0.1, 0.03, 6), [BenchRequest("hi", 6)] * 4, concurrency=2)
    summary = summarise(records, 1000, 1000)
    assert summary.num_ok == 4
    first, all_of_it = summary.ttft_ms["p50"], summary.e2e_ms["p50"]
    assert all_of_it >= 249
    assert 100 <= first <= all_of_it - 100  # six gaps follow
    assert 29 <= summary.itl_ms["p50"] <= (all_of_it - first) / 2
    assert 29 <= summary.tpot_ms["p50"] <= (all_of_it - first) / 2


async def test_open_loop_keeps_its_times_and_refusals_count() -> None:
    jobs = [BenchRequest("hi", 2, 0.0), BenchRequest("refuse", 2, 0.05), BenchRequest("hi", 2, 0.15)]
    records = await run(slow_server(0.0, 0.0, 2, least=3), jobs)
    assert all(record.sent_at > job.arrival_at - 1e-3 for record, job in zip(records, jobs, strict=True))
    assert [r.error for r in records] == ["", "HTTP 429", ""]
    assert summarise(records, 5000, 5000).attainment == pytest.approx(2 / 3)


async def test_a_dead_endpoint_is_an_error_of_the_request() -> None:
    client = Client("http://127.0.0.1:9", "m", "", 5, {}, chat=False)
    record = await client.send(BenchRequest("x", 1), 0.0)
    await client.close()
    assert record.error == "transport: ConnectError"


async def test_broken_streams_are_failures_of_their_request_alone() -> None:
    app = FastAPI()
    streams = {
        "cut": 'data: {"choices": [{"text": "x"}]}\n\n',
        "garbage": "data: {oops\n\n",
        "error": 'data: {"error": {"message": "died"}}\n\ndata: [DONE]\n\n',
        "no text": 'data:{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}\n\ndata:[DONE]\n\n',
        "nothing": "data: [DONE]\n\n",
    }

    @app.post("/v1/completions", response_model=None)
    async def completions(body: dict[str, Any]) -> StreamingResponse:
        return StreamingResponse(iter([streams[body["prompt"]]]))

    records = await run(app, [BenchRequest(name, 1) for name in streams])
    assert [r.error for r in records] == [
        "stream cut short",
        "malformed event",
        "error in the stream",
        "",
        "no token",
    ]


def test_events_are_found_wherever_the_bytes_are_cut() -> None:
    raw = 'data: {"a": "\u2028é"}\r\n\r\n: comment\n\ndata:[DONE]\n\n'.encode()
    for size in range(1, 9):
        reader = SseReader()
        pieces = [raw[i : i + size] for i in range(0, len(raw), size)]
        got = [payload for piece in pieces for payload in reader.feed(piece)]
        assert got == ['{"a": "\u2028é"}'.encode(), b"[DONE]"]


def made_up(ttft_s: float, gaps: list[float], error: str = "") -> Record:
    times = [ttft_s]
    for gap in gaps:
        times.append(times[-1] + gap)
    return Record(
        sent_at=0.0,
        tokens_at=[] if error else times,
        done_at=times[-1],
        prompt_tokens=10,
        output_tokens=len(times),
        error=error,
    )


def test_figures_of_made_up_records_are_exact() -> None:
    records = [made_up(0.1, [0.02, 0.04]), made_up(0.5, [0.1]), made_up(0.2, [], error="HTTP 500")]
    summary = summarise(records, slo_ttft_ms=450, slo_tpot_ms=40)
    assert summary.ttft_ms["mean"] == pytest.approx(300)
    assert summary.itl_ms["p50"] == pytest.approx(40)
    assert summary.tpot_ms["p99"] == pytest.approx(100)
    assert summary.attainment == pytest.approx(1 / 3)
    assert summary.errors == {"HTTP 500": 1}
    assert summary.slo_requests_per_s == pytest.approx(summary.attainment * 3 / summary.duration_s)
    assert percentiles([float(i) for i in range(1, 101)]) == {"mean": 50.5, "p50": 50, "p90": 90, "p99": 99}


def test_goodput_is_the_last_rate_before_attainment_breaks() -> None:
    def at(rate: float, good: int) -> Any:
        return summarise([made_up(0.1, [])] * good + [made_up(9.0, [])] * (10 - good), 450, 40, rate)

    sweep = [at(1, 10), at(2, 9), at(4, 8), at(8, 9)]
    assert goodput(sweep, 0.9) == 2
    assert goodput(sweep, 0.99) == 1


def test_poisson_arrivals_have_their_rate_and_burstiness() -> None:
    times = poisson_arrivals(20_000, 5.0, 1.0, seed=1)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variation = sum((g - mean) ** 2 for g in gaps) / len(gaps) / mean**2
    assert mean == pytest.approx(0.2, rel=0.03)
    assert variation == pytest.approx(1.0, rel=0.1)
    assert poisson_arrivals(5, 5.0, 1.0, seed=1) == times[:5]


def test_arrivals_follow_a_rate_curve(tmp_path: Path) -> None:
    path = tmp_path / "rates.csv"
    path.write_text(
        "pool,window_start_s,aggregate_rps,active_clients\na,0,1,2\nb,600,3,2\nb,0,1,2\nb,1200,0,2\na,600,1,2\n"
    )
    windows = read_rate_curve(path, "b")
    assert windows == [RateWindow(0, 600, 1), RateWindow(600, 600, 3), RateWindow(1200, 600, 0)]
    times = curve_arrivals(windows, 4000, seed=1)
    assert times == sorted(times)
    assert times[-1] < 1200
    assert sum(t < 600 for t in times) == pytest.approx(1000, rel=0.1)
    assert sum(600 <= t < 900 for t in times) == pytest.approx(1500, rel=0.1)
    assert len(read_rate_curve(path)) == 2
    with pytest.raises(ConfigError, match="its pools: a, b"):
        read_rate_curve(path, "c")
    with pytest.raises(ConfigError, match="use it as --rate-curve"):
        read_trace(path)


TRACES = {
    "mooncake.jsonl": "\n".join(
        json.dumps({"timestamp": t, "input_length": 1000, "output_length": 9, "hash_ids": [0, i]})
        for i, t in enumerate([0, 0, 0, 0, 3000, 3000, 3000, 3000])
    ),
    "sharegpt.jsonl": '{"timestamp":46,"input_length":30,"output_length":5,"hash_ids":[0,1]}\n{"timestamp":347,"input_length":20,"output_length":7,"hash_ids":[0,3]}',
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8",
    "servegen.csv": "arrival_s,input_tokens,output_tokens,client\n0.016,437,320,12\n0.025,291,560,11",
}


@pytest.mark.parametrize("name", TRACES)
def test_every_trace_format_is_read(name: str, tmp_path: Path) -> None:
    plain, packed = tmp_path / name, tmp_path / f"{name}.gz"
    plain.write_text(TRACES[name])
    packed.write_bytes(gzip.compress(TRACES[name].encode()))
    rows = read_trace(plain)
    assert rows == read_trace(packed)
    assert rows[0].arrival_at == 0.0
    assert all(row.input_tokens > 0 and row.output_tokens > 0 for row in rows)
    assert len(rows) == (8 if name.startswith("mooncake") else 2)


def test_mooncakes_groups_are_spread_and_prefixes_are_shared(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(TRACES["mooncake.jsonl"])
    rows = read_trace(path)
    assert len({row.arrival_at for row in rows}) == 8
    jobs = from_trace(rows, 8, 1.0, 800, max_output=5, vocab_size=1000, seed=0)
    assert all(job.prompt[:512] == jobs[0].prompt[:512] for job in jobs)
    assert len({tuple(job.prompt) for job in jobs}) == 8
    assert {(len(job.prompt), job.max_tokens) for job in jobs} == {(800, 5)}
    other = from_trace(rows, 8, 1.0, 800, max_output=5, vocab_size=1000, seed=0, run=1)
    assert all(a.prompt[:16] != b.prompt[:16] for a in jobs for b in other), (
        "another run must find nothing cached"
    )
    text = from_trace(rows, 2, 1.0, 800, max_output=5, vocab_size=0, seed=0)
    assert text[0].prompt.split()[:512] == text[1].prompt.split()[:512]


def test_shared_blocks_of_sixteen_tokens(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(TRACES["sharegpt.jsonl"])
    one, two = from_trace(read_trace(path), 2, 1.0, 1000, max_output=10, vocab_size=1000, seed=0)
    assert (len(one.prompt), len(two.prompt)) == (30, 20)
    assert one.prompt[:16] == two.prompt[:16]
    assert one.prompt[16:20] != two.prompt[16:20]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real traces lie beside the project, where there are any")
@pytest.mark.parametrize(
    ("name", "count", "minutes"),
    [
        ("mooncake_fast25_conversation.jsonl.gz", 12031, 59),
        ("azure2023_code.csv.gz", 8819, 57),
        ("azure2023_conv.csv.gz", 19366, 58),
        ("servegen_deepseek-r1_1h.csv.gz", 126485, 60),
        ("sharegpt_llama31_300req_blk16.jsonl.gz", 300, 29 / 60),
    ],
)
def test_real_traces_have_their_known_sizes(name: str, count: int, minutes: float) -> None:
    rows = read_trace(SHARED / name)
    assert len(rows) == count
    assert rows[-1].arrival_at / 60 == pytest.approx(minutes, rel=0.03)
    assert {row.prefix_block_tokens for row in rows} <= {0, 16 if "blk16" in name else 512}


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real traces lie beside the project, where there are any")
def test_real_rate_curves() -> None:
    windows = read_rate_curve(SHARED / "servegen_rate_curves_10min.csv.gz", "reason/deepseek-r1")
    assert len(windows) == 144
    assert {window.duration_s for window in windows} == {600}


def test_what_is_no_trace_is_said_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="no known format: 'arrival_s' is missing") as refusal:
        read_trace(path)
    for word in ("timestamp (ms)", "arrival_s, input_tokens", "ContextTokens", "'a,b'"):
        assert word in str(refusal.value)


def test_the_report_has_the_machine_and_a_picture(tmp_path: Path) -> None:
    records = [made_up(0.1, [0.02, 0.03]), made_up(0.2, [0.02])]
    sweep = [summarise(records, 450, 40, rate) for rate in (1.0, 2.0)]
    write_json(tmp_path / "r.json", sweep, {"seed": 0})
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["machine"]["cores"]
    assert written["goodput"] == {"90%": 2.0, "99%": 2.0}
    draw(tmp_path / "r.png", sweep, [records, records])
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_synthetic_lengths() -> None:
    jobs = synthetic(50, 100, 20, 0.5, vocab_size=1000, seed=3)
    assert all(50 <= len(job.prompt) <= 150 and 10 <= job.max_tokens <= 30 for job in jobs)
    assert jobs == synthetic(50, 100, 20, 0.5, vocab_size=1000, seed=3)
