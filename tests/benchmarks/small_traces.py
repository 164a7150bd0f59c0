"""Made-up traces, named and written as those that the benchmarks read: 2 requests a second for 400 s."""

import csv
import gzip
import io
import json
import random
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

NUM_REQUESTS, SECONDS = 800, 400.0
START = datetime(2023, 11, 16, 18, 0)


def write_traces(folder: Path) -> None:
    rng = random.Random(1)
    work = [
        (SECONDS * i / NUM_REQUESTS, rng.randrange(1000, 3000), rng.randrange(5, 30))
        for i in range(NUM_REQUESTS)
    ]
    blocks = {
        "mooncake_fast25_conversation": 512,
        "mooncake_fast25_synthetic": 512,
        "sharegpt_llama31_300req_blk16": 16,
    }
    for name, block_tokens in blocks.items():
        lines = [
            {
                "timestamp": int(at * 1000),
                "input_length": num_prompt,
                "output_length": num_output,
                "hash_ids": [
                    number % 10,
                    *range(1000 * number + 1000, 1000 * number + 1000 + num_prompt // block_tokens),
                ],
            }
            for number, (at, num_prompt, num_output) in enumerate(work)
        ]
        _write(folder / f"{name}.jsonl.gz", "".join(json.dumps(line) + "\n" for line in lines))
    for name, times in (("azure2023_conv", 1), ("azure2023_code", 5)):  # long prompts: few fill a fleet
        rows = [
            (START + timedelta(seconds=at), times * num_prompt, num_output)
            for at, num_prompt, num_output in work
        ]
        _write(folder / f"{name}.csv.gz", _table(("TIMESTAMP", "ContextTokens", "GeneratedTokens"), rows))
    _write(folder / "agent_lmcache_sessions.jsonl.gz", _sessions(work))
    columns = ("arrival_s", "input_tokens", "output_tokens", "client")
    clients = [(*one, f"client {number % 3}") for number, one in enumerate(work)]
    _write(folder / "servegen_deepseek-r1_1h.csv.gz", _table(columns, clients))


def _sessions(work: list[tuple[float, int, int]]) -> str:
    """Four sessions of three turns, each prompt going on from the one before."""
    lines = [
        {
            "session_id": f"session {session}",
            "turn": turn,
            "t_ms": 1000 * turn,
            "input_length": 640 * (turn + 1),
            "output_length": work[session][2],
            "hash_runs": [[100 * session, 10 * (turn + 1)]],
        }
        for session in range(4)
        for turn in range(3)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def _table(columns: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows([columns, *rows])
    return text.getvalue()


def _write(path: Path, text: str) -> None:
    path.write_bytes(gzip.compress(text.encode()))
