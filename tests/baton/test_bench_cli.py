"""`baton bench` as a user runs it, against an endpoint whose delays are known."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from baton.cli.bench import bench
from core.errors import ConfigError
from tests.baton.openai_fake import Fake, serving
from tests.patience import PATIENCE_S

app = typer.Typer()
app.command()(bench)


@pytest.fixture
def fake() -> Iterator[Fake]:
    with serving(Fake(first_s=0.05, gap_s=0.01)) as fake:
        yield fake


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def test_a_sweep_is_reported_and_repeats_no_prompt(fake: Fake, tmp_path: Path) -> None:
    out, plot = tmp_path / "r.json", tmp_path / "r.png"
    result = run(
        "--base-url", f"{fake.url}/v1", "--rate", "20,40", "-n", 6, "--input-tokens", 40, "--output-tokens", 4,
        "--slo-ttft-ms", 2000, "--slo-tpot-ms", 500, "--json", out, "--plot", plot,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["goodput"] == {"90%": 40.0, "99%": 40.0}
    assert [r["offered_rate"] for r in written["runs"]] == [20, 40]
    assert written["parameters"]["model"] == "fake"
    assert all(r["num_ok"] == 6 and r["ttft_ms"]["p50"] >= 50 for r in written["runs"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "goodput: 40/s" in result.output
    bodies = fake.seen()
    assert len(bodies) == 2 + 6 + 6
    assert len({tuple(b["prompt"]) for b in bodies}) == len(bodies), "a cached prompt flatters the server"
    assert {(len(b["prompt"]), b["max_tokens"], b["stream"]) for b in bodies} == {(40, 4, True)}


def test_prompts_of_a_file_over_chat(fake: Fake, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(
        'one\n{"prompt": "two"}\n{"messages": [{"role": "system", "content": "three"}]}\nfour\n'
    )
    result = run(
        "--base-url", fake.url, "--chat", "--prompts", prompts, "-n", 3, "--concurrency", 1, "--warmup", 1
    )
    assert result.exit_code == 0, result.output
    assert [b["messages"][0]["content"] for b in fake.seen()] == ["four", "one", "two", "three"]
    assert "3 of 3 answered" in result.output


def test_refusals_are_counted_and_quoted(fake: Fake, tmp_path: Path) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("refuse\n")
    result = run("--base-url", fake.url, "--prompts", prompts, "-n", 3)
    assert result.exit_code == 1
    assert "0 of 3 answered, errors {'HTTP 429': 3}" in result.output
    assert "first error: HTTP 429: too many requests" in result.output


def test_a_trace_and_a_rate_curve_bring_their_arrivals(fake: Fake, tmp_path: Path) -> None:
    trace, curve, out = tmp_path / "t.csv", tmp_path / "c.csv", tmp_path / "r.json"
    trace.write_text("arrival_s,input_tokens,output_tokens,client\n0,30,2,1\n10,900,3,1\n")
    curve.write_text(
        "pool,window_start_s,aggregate_rps,active_clients\na,0,5,1\na,600,0,1\nb,0,0,1\nb,600,5,1\n"
    )
    common = ("--base-url", fake.url, "--warmup", 0, "--json", out, "--output-tokens", 2)
    result = run(*common, "--trace", trace, "--time-scale", 0.02, "--max-input-tokens", 50)
    assert result.exit_code == 0, result.output
    assert [len(b["prompt"]) for b in fake.seen()] == [30, 50]
    assert json.loads(out.read_text())["runs"][0]["offered_rate"] == pytest.approx(10)
    result = run(*common, "--rate-curve", curve, "--pool", "a", "-n", 4, "--time-scale", 0.0005)
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["runs"][0]["offered_rate"] > 4 / 0.3, (
        "the curve's 600 s are 0.3 s here"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--base-url", "http://127.0.0.1:9"], "no OpenAI endpoint answers at http://127.0.0.1:9"),
        (["--base-url", "nonsense"], "no OpenAI endpoint answers at nonsense"),
        (["--rate", "fast"], "--rate takes numbers"),
        (["--rate", "1,-1"], "--rate must be positive"),
        (["--rate", "nan"], "--rate must be positive"),
        (["--json", "/no/such/folder/r.json"], "cannot write /no/such/folder/r.json"),
        (["--trace", "/no/such/trace.csv"], "cannot read the trace"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], said: str) -> None:
    error = run(*arguments).exception
    assert isinstance(error, ConfigError)
    assert said in str(error)
    assert "\n" not in str(error)


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    with serving(Fake(first_s=0.01, gap_s=0.005)) as fake:
        command = f"bench --base-url {fake.url} --rate 20,40 -n 1000 --output-tokens 2 --json {out}".split()
        process = subprocess.Popen(
            [sys.executable, "-m", "baton.cli", *command], stdout=subprocess.PIPE, text=True
        )
        try:
            for _ in range(20):
                fake.bodies.get(timeout=60)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0, output
    assert "interrupted" in output
    (only,) = json.loads(out.read_text())["runs"]
    assert 1 <= only["num_ok"] == only["num_offered"] < 1000
