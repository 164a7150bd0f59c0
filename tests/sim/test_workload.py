"""Arrivals share what the trace says they share, and copies share nothing."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.bench.traces import TraceRow
from baton.cli.main import app
from core.errors import ConfigError
from sim.catalogue.catalogue import GPUS, MODELS, num_blocks, step_cost
from sim.trace_workload import arrivals

ROWS = [
    TraceRow(arrival_at=0.0, input_tokens=40, output_tokens=3, prefix_ids=(0, 1, 2), prefix_block_tokens=16),
    TraceRow(arrival_at=1.0, input_tokens=48, output_tokens=4, prefix_ids=(0, 1, 9), prefix_block_tokens=16),
    TraceRow(arrival_at=2.0, input_tokens=5, output_tokens=2),
]


def shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_prompts_share_their_common_blocks_and_no_more() -> None:
    first, second, third = (item.prompt for item in arrivals(ROWS, 10))
    assert (len(first), len(second), len(third)) == (40, 48, 5)
    assert shared(first, second) == 32
    assert shared(first, third) == 0


def test_copies_are_shifted_and_share_nothing() -> None:
    work = arrivals(ROWS, 4, copies=2)
    assert [item.at for item in work] == [0, 0, 1, 2, 2, 3]
    assert shared(work[0].prompt, work[3].prompt) == shared(work[0].prompt, work[4].prompt) == 0


def test_roofline_of_a_known_pair() -> None:
    cost = step_cost(GPUS["H100"], MODELS["llama-3.1-8b"])
    assert cost.weights_read_s == pytest.approx(16.06e9 / (3.35e12 * 0.8))
    with pytest.raises(ConfigError, match="131.50 GiB of weights"):
        num_blocks(GPUS["H100"], MODELS["llama-3.1-70b"], 16)


def test_the_command_serves_a_trace(tmp_path: Path) -> None:
    trace, report = tmp_path / "t.jsonl", tmp_path / "r.json"
    rows = [
        {"timestamp": 100 * i, "input_length": 100, "output_length": 5, "hash_ids": [0, i]} for i in range(8)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    ran = CliRunner().invoke(app, ["simulate", "--trace", str(trace), "--json", str(report)])
    assert ran.exit_code == 0, ran.output
    figures = json.loads(report.read_text())
    assert (figures["num_offered"], figures["num_finished"], figures["output_tokens"]) == (8, 8, 40)
    assert figures["attainment"] == 1.0
