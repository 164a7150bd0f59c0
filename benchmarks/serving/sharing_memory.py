"""Models that share memory which holds only some of them, live: requests in time, by who decides which are awake.

    python -m benchmarks.serving.sharing_memory --traces ../shared/traces [--json FILE] [--smoke]

Six random decoders of six families in one process (`baton serve --local`), memory for two. Each model's requests come as in a
quarter of a public trace, of which some are taken at random, pressed into `LASTS_S`: its bursts stay. A request has one of 12
prompts of the trace's lengths, made shorter, and is greedy. A cell is a mean rate of requests of all models.

- `demand`: a residency group, which is Baton's own decision.
- `lru`: the same processes in the mode `manual`, and a door in front (`LeastRecentlyUsed`) that swaps for each request in the
  order of arrival, as Ollama and llama-swap do: it has its models sleep and wake up by the routes for operators.
- `own`: all six are awake all the time. That needs three times the memory, and is what no decision can pass.

All three run in turns, with a server of their own in each round. A request is in time if its first token comes within
`TARGET_S` of its arrival. Every answer is compared with that of `own`."""

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
import torch
import yaml
from rich.progress import track
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from baton.bench.sse import DONE, SseReader
from baton.bench.traces import TraceRow, read_trace
from benchmarks.report import parser, write
from models.files.hub import resolve
from tests.e2e.cluster_process import ServeProcess, serving

PREDICTION = (
    "demand has at least 1.3 times the requests in time of lru in the geometric mean of the cells, and 0.98 at the least: "
    "about as many where few come, twice as many where more come than swapping for each request can serve. own is ahead of both"
)
TRACES: Final = {
    "llama": ("azure2023_code.csv.gz", 0.0),
    "qwen3": ("azure2023_conv.csv.gz", 0.0),
    "mistral": ("mooncake_fast25_conversation.jsonl.gz", 0.0),
    "olmo2": ("servegen_deepseek-r1_1h.csv.gz", 0.0),
    "granite": ("azure2023_code.csv.gz", 0.5),
    "glm4": ("azure2023_conv.csv.gz", 0.5),
}
"""Each family's trace, and the share of it that is left out before the part that is taken."""
NUM_AWAKE, PART, LASTS_S, PATIENCE_S, TARGET_S = 2, 0.25, 60.0, 30.0, 2.0
RATES, ROUNDS = (1.0, 3.0, 6.0), 3
NUM_PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 12, (16, 192), (4, 48)
SHORTER = {"prompt": 20, "output": 8}
"""How many times as long as here prompts and outputs are in the traces."""
SIZES: Final = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
SMALL: Final = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 8}


@dataclass(frozen=True, slots=True)
class Asked:
    at: float
    """Seconds from the beginning of the cell."""
    model: str
    prompt: int


@dataclass(frozen=True, slots=True)
class Answered:
    asked: Asked
    first_s: float
    """From its arrival to its first token; infinite where it was refused."""
    text: str


class Door(Protocol):
    """What stands between clients and the server."""

    def admit(self, model: str) -> AbstractAsyncContextManager[None]:
        """Let a request in when its model is awake, or give up."""
        ...


class Open:
    def admit(self, model: str) -> AbstractAsyncContextManager[None]:
        return nullcontext()


class LeastRecentlyUsed:
    """Each request for a model that sleeps has it woken up, in the order of arrival. The model that was not used for longest
    makes way once what runs on it has ended; who comes for it meanwhile waits."""

    def __init__(self, http: httpx.AsyncClient, models: Sequence[str]) -> None:
        self._http, self._models = http, models
        self._changed = asyncio.Condition()
        self._awake: list[str] = [*models]
        """The one that was not used for longest is the first."""
        self._swapping: set[str] = set()
        self._running: defaultdict[str, int] = defaultdict(int)

    async def begin(self) -> None:
        for model in self._models[NUM_AWAKE:]:
            await self._tell("sleep", model)
        self._awake = [*self._models[:NUM_AWAKE]]

    @asynccontextmanager
    async def admit(self, model: str) -> AsyncGenerator[None]:
        async with self._changed:
            while model not in self._awake:
                if model not in self._swapping and len(self._swapping) < NUM_AWAKE and self._awake:
                    self._swapping.add(model)
                    victim = self._awake.pop(0)
                    swapping = asyncio.create_task(self._swap(victim, model))
                    swapping.add_done_callback(lambda done: done.result())
                await self._changed.wait()
            self._use(model, 1)
        try:
            yield
        finally:
            async with self._changed:
                self._use(model, -1)
                self._changed.notify_all()

    def _use(self, model: str, change: int) -> None:
        self._running[model] += change
        if model in self._awake:
            self._awake.remove(model)
            self._awake.append(model)

    async def _swap(self, victim: str, model: str) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._running[victim])
        await self._tell("sleep", victim)
        await self._tell("wake_up", model)
        async with self._changed:
            self._swapping.discard(model)
            self._awake.append(model)
            self._changed.notify_all()

    async def _tell(self, what: str, model: str) -> None:
        query = {"model": model} | ({"level": "2"} if what == "sleep" else {})
        (await self._http.post(f"/{what}", params=query)).raise_for_status()


def make_checkpoint(folder: Path, family: str, smoke: bool) -> Path:
    torch.manual_seed(len(family))
    tokenizer = AutoTokenizer.from_pretrained(resolve("embedded"))
    sizes = SIZES | (SMALL if smoke else {})
    made = AutoConfig.for_model(
        family, **sizes, vocab_size=len(tokenizer), eos_token_id=None, pad_token_id=None
    )
    AutoModelForCausalLM.from_config(made).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def settings(way: str, checkpoints: dict[str, Path]) -> dict[str, Any]:
    residency = {
        "demand": {"mode": "on_demand", "group": "memory", "level": 2, "least_awake_s": 1.0, "idle_s": 3600},
        "lru": {"mode": "manual", "level": 2},
        "own": {"mode": "always"},
    }
    return {
        "models": {name: {"path": str(path)} for name, path in checkpoints.items()},
        "prefill_instances": 0,
        "engine": {"num_blocks": 512, "num_threads": 2},
        "schedule": {"residency": residency[way], "max_queue_wait_s": PATIENCE_S},
        "slo_classes": {"standard": {"ttft_s": TARGET_S, "tpot_s": 1.0}},
    } | ({"residency_groups": {"memory": {"awake_models": NUM_AWAKE}}} if way == "demand" else {})


@cache
def part_of(folder: Path, family: str) -> list[TraceRow]:
    """Return the part of a trace that a model has. Arrivals are shares of the part's length."""
    name, begin = TRACES[family]
    rows = read_trace(folder / name)
    placed = [replace(row, arrival_at=(row.arrival_at / rows[-1].arrival_at - begin) / PART) for row in rows]
    return [row for row in placed if 0 <= row.arrival_at < 1]


def offered(folder: Path, rate: float, lasts_s: float, seed: int) -> list[Asked]:
    """Return what is asked for in a cell, in the order of arrival."""
    found: list[Asked] = []
    for family in TRACES:
        rows, rng = part_of(folder, family), random.Random(f"{seed} {family}")
        share = rate / len(TRACES) * lasts_s / max(1, len(rows))
        found += [
            Asked(row.arrival_at * lasts_s, family, rng.randrange(NUM_PROMPTS))
            for row in rows
            if rng.random() < share
        ]
    return sorted(found, key=lambda asked: asked.at)


def bodies(folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return what is sent for each model's prompts."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for family in TRACES:
        rng = random.Random(family)
        for number, row in enumerate(rng.choices(part_of(folder, family), k=NUM_PROMPTS)):
            length = clipped(row.input_tokens // SHORTER["prompt"], PROMPT_TOKENS)
            found[family, number] = {
                "model": family,
                "prompt": [rng.randrange(10, 500) for _ in range(length)],
                "max_tokens": clipped(row.output_tokens // SHORTER["output"], OUTPUT_TOKENS),
                "temperature": 0,
                "stream": True,
            }
    return found


def clipped(number: int, bounds: tuple[int, int]) -> int:
    return min(max(number, bounds[0]), bounds[1])


async def ask(
    http: httpx.AsyncClient, door: Door, asked: Asked, body: dict[str, Any], begun: float
) -> Answered:
    await asyncio.sleep(begun + asked.at - time.perf_counter())
    first_s, text = float("inf"), ""
    try:
        async with (
            asyncio.timeout(2 * PATIENCE_S),
            door.admit(asked.model),
            http.stream("POST", "/v1/completions", json=body) as answer,
        ):
            if answer.status_code != 200:
                return Answered(asked, float("inf"), "")
            reader = SseReader()
            async for piece in answer.aiter_bytes():
                for event in (json.loads(payload) for payload in reader.feed(piece) if payload != DONE):
                    if "error" in event:
                        return Answered(asked, float("inf"), "")
                    first_s = min(first_s, time.perf_counter() - begun - asked.at)
                    text += event["choices"][0]["text"]
    except TimeoutError:
        return Answered(asked, float("inf"), "")
    return Answered(asked, first_s, text)


async def cell(
    server: ServeProcess, way: str, schedule: Sequence[Asked], bodies: dict[tuple[str, int], dict[str, Any]]
) -> list[Answered]:
    """Ask for all of `schedule`. Where models share memory, two are awake at the beginning."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.base_url, timeout=None, limits=limits) as http:
        door = LeastRecentlyUsed(http, [*TRACES]) if way == "lru" else Open()
        if isinstance(door, LeastRecentlyUsed):
            await door.begin()
        begun = time.perf_counter()
        found = await asyncio.gather(
            *(ask(http, door, one, bodies[one.model, one.prompt], begun) for one in schedule)
        )
        if way == "lru":
            for model in TRACES:
                (await http.post("/wake_up", params={"model": model})).raise_for_status()
        return found


def judged(found: Sequence[Answered], right: dict[tuple[str, int], str]) -> dict[str, Any]:
    """Return the share in time, of all and of the model that has the least. Notes what no other way has said before."""
    by_model: defaultdict[str, list[bool]] = defaultdict(list)
    num_wrong = 0
    for one in found:
        by_model[one.asked.model].append(one.first_s <= TARGET_S)
        if one.first_s < float("inf"):
            num_wrong += right.setdefault((one.asked.model, one.asked.prompt), one.text) != one.text
    shares = {model: statistics.fmean(each) for model, each in by_model.items()}
    came = sorted(one.first_s for one in found if one.first_s < float("inf"))
    return {
        "requests": len(found),
        "in_time": round(statistics.fmean(one.first_s <= TARGET_S for one in found), 4),
        "worst_model": round(min(shares.values()), 4),
        "first_token_s": {"p50": round(came[len(came) // 2], 3), "p90": round(came[len(came) * 9 // 10], 3)},
        "not_answered": len(found) - len(came),
        "wrong": num_wrong,
    }


def summary(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ratios = [one["demand"]["in_time"] / max(1e-3, one["lru"]["in_time"]) for one in cells]
    return {
        "demand / lru": {
            "geometric mean": round(statistics.geometric_mean(ratios), 3),
            "worst": round(min(ratios), 3),
            "best": round(max(ratios), 3),
        },
        "wrong": sum(one[way]["wrong"] for one in cells for way in ("own", "demand", "lru")),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--traces", type=Path, required=True)
    args = options.parse_args()
    rates, rounds, lasts_s = ((2.0,), 1, 5.0) if args.smoke else (RATES, ROUNDS, LASTS_S)
    content, right = bodies(args.traces), dict[tuple[str, int], str]()
    found: dict[tuple[int, float], dict[str, Any]] = defaultdict(dict)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoints = {family: make_checkpoint(folder / family, family, args.smoke) for family in TRACES}
        for number, way in track(
            [(number, way) for number in range(rounds) for way in ("own", "demand", "lru")]
        ):
            (file := folder / f"{way}.yaml").write_text(yaml.safe_dump(settings(way, checkpoints)))
            with serving("--local", "--config", str(file), log=folder / f"{way}.log") as server:
                for rate in rates:
                    schedule = offered(args.traces, rate, lasts_s, number)
                    result = judged(asyncio.run(cell(server, way, schedule, content)), right)
                    found[number, rate][way] = result
                    print(f"round {number}, {rate:g}/s, {way}: {result}", file=sys.stderr)
    cells = [{"round": number, "rate": rate, **ways} for (number, rate), ways in found.items()]
    result = summary(cells)
    print(json.dumps(result, indent=1))
    setup = {
        "models": [*TRACES],
        "awake": NUM_AWAKE,
        "target_s": TARGET_S,
        "lasts_s": lasts_s,
        "sizes": SIZES,
    }
    command = "benchmarks.serving.sharing_memory --traces ../shared/traces"
    write(args.json, command, {"prediction": PREDICTION, "setup": setup, "summary": result, "cells": cells})


if __name__ == "__main__":
    main()
