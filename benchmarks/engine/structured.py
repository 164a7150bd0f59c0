"""What a grammar adds: to a decode step of 32 sequences, to the first token, and to others while a costly one is compiled.

    python -m benchmarks.engine.structured [--json FILE] [--threads 1] [--rounds 20] [--smoke]

A model of 0.1 B random weights and a vocabulary of 131,072 tokens from random merges. The engine and the rank of an instance
run in this process. `itl` is the time from a sequence's token to its next with 32 sequences decoding, all free or all held to a
schema in turns; its growth is the median of the rounds' ratios. `first token` is a prompt of 128 tokens with a schema that the
ingress and the rank know, or that is new to both, less the same without a schema. `bomb`: p99 of the same gaps of 16 sequences,
every other one held to a schema, while new costly schemas come one after the other: in turns one of 3,000 optional members, which
the ingress' checker refuses, and one of 375 branches, which it compiles, then the rank, and which is then answered. Its growth is
the median of the ratios of neighbouring rounds. The same beside a process that only counts says what the other core costs; and
beside requests without a schema, as many and as long as those that were answered, what any request costs whose prompt joins a
step."""

import asyncio
import json
import mmap
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.engine.undisturbed import Undisturbed
from benchmarks.report import parser, write
from cluster.ingress.bodies.structured import schema_grammar
from cluster.ingress.grammar.grammar_checker import GrammarChecker
from core.clock import WallClock
from core.config.cluster_config import EngineConfig, ModelConfig
from core.errors import RequestError
from core.types import Grammar, Request, SamplingParams, TokenOut
from decode.headroom_policy import HeadroomPolicy
from engine.execution.build_group import build_group
from engine.loop import Engine
from engine.planning.step_scheduler import StepScheduler
from engine.sizing.pool_size import size_pool

PREDICTION = (
    "gaps at 32 grow by 4 %; a known schema adds 1 ms to the first token, a new one 8 ms at p90; "
    "the bomb 8 % to p99, and 3 % to p99 beside as many requests without a schema"
)
NUM_MERGES, NUM_TOKENS, PROMPT = 130_815, 24, 128


def make_model(folder: Path, smoke: bool) -> None:
    """A checkpoint whose tokens, beside bytes, are random merges of two others."""
    rng = random.Random(0)
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    known, merges = set(pieces), list[tuple[str, str]]()
    while len(merges) < (500 if smoke else NUM_MERGES):
        pair = rng.choice(pieces[:20_000]), rng.choice(pieces[:2_000])
        if "".join(pair) not in known:
            merges.append(pair)
            pieces.append("".join(pair))
            known.add(pieces[-1])
    tokenizer = Tokenizer(BPE(vocab={piece: i + 1 for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size() + 1,
        hidden_size=64 if smoke else 512,
        intermediate_size=128 if smoke else 1536,
        num_hidden_layers=2 if smoke else 12,
        num_attention_heads=8,
        num_key_value_heads=2,
        eos_token_id=tokenizer.token_to_id("<end>"),
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(folder)


class Bench(Undisturbed):
    """One instance's engine, which runs within `running`. Hears its tokens (core.ports.EngineEvents)."""

    def __init__(self, folder: Path, threads: int) -> None:
        engine = EngineConfig(num_threads=threads, kv_bytes=256 << 20, device="cpu", prefix_cache=False)
        model = ModelConfig(path=str(folder))
        size = size_pool(folder, model, engine)
        memory = memoryview(mmap.mmap(-1, size.num_bytes))
        group = build_group(folder, model, engine, size, memory, None)
        planner = StepScheduler(engine, size.num_blocks, size.max_context_tokens, HeadroomPolicy())
        self.engine = Engine(planner, group, WallClock())
        self.end: int = json.loads((folder / "config.json").read_text())["eos_token_id"]
        self.count = 0
        self.times: dict[str, list[float]] = {}
        """When each token of a request came."""
        self.ended: dict[str, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        task = asyncio.create_task(self.engine.run(self))
        yield
        task.cancel()  # a step of the last bomb may still run
        with suppress(asyncio.CancelledError):
            await task
        await self.engine.close()

    def on_tokens(self, tokens: list[TokenOut]) -> None:
        now = time.perf_counter()
        for token in tokens:
            self.times[token.request_id].append(now)
            ended = self.ended[token.request_id]
            if token.finish is not None and not ended.cancelled():  # nobody waits for the last bomb
                ended.set_result(None)

    def on_error(self, error: BaseException) -> None:
        for future in self.ended.values():
            if not future.done():
                future.set_exception(error)

    def add(self, num_prompt: int, num_tokens: int, grammar: str = "") -> str:
        self.count += 1
        rng, name = random.Random(self.count), f"r{self.count}"
        sampling = SamplingParams(
            max_tokens=num_tokens,
            seed=self.count,
            stop_token_ids=(self.end,) if grammar else (),
            grammar=Grammar(text=grammar) if grammar else None,
        )
        prompt = tuple(rng.randrange(1, 250) for _ in range(num_prompt))
        self.times[name], self.ended[name] = [], asyncio.get_running_loop().create_future()
        self.engine.add(Request(id=name, prompt=prompt, sampling=sampling, reply_to="b"))
        return name

    async def itls(self, grammars: Sequence[str]) -> list[float]:
        """Return the seconds between tokens of a sequence for each of `grammars`, while all of them decode if they do."""
        names = [self.add(16, NUM_TOKENS, grammar) for grammar in grammars]
        await asyncio.gather(*(self.ended[name] for name in names))
        times = [self.times.pop(name) for name in names]
        begins, ends = max(each[0] for each in times), min(each[-1] for each in times)
        gaps = [pair for each in times for pair in pairwise(each)]
        together = [(start, end) for start, end in gaps if begins <= start and end <= ends]
        # Masks may come so late on a busy machine that they never do.
        return [end - start for start, end in together or gaps]

    async def ttft(self, grammar: str, checker: GrammarChecker) -> float:
        started = time.perf_counter()
        if grammar:
            await checker.check(grammar, "response_format")
        name = self.add(PROMPT, 1, grammar)
        await self.ended[name]
        return self.times.pop(name)[0] - started


def rows_schema(fields: Sequence[str]) -> str:
    """Lists too long to be finished here."""
    members = {name: {"type": "string"} if i % 2 else {"type": "integer"} for i, name in enumerate(fields)}
    row = {"type": "object", "properties": members, "required": list(fields), "additionalProperties": False}
    return schema_grammar({"type": "array", "items": row, "minItems": 500})


def new_schema(number: int) -> str:
    return rows_schema([f"field_{number}_{i}" for i in range(12)])


async def measure(folder: Path, threads: int, rounds: int, bomb_members: int) -> dict[str, Any]:
    bench = Bench(folder, threads)
    checker = GrammarChecker(folder, json.loads((folder / "config.json").read_text())["vocab_size"])
    known = rows_schema(["name", "count", "city", "size"])
    await checker.check(known, "response_format")
    async with bench.running():
        return {
            **await added_to_steps(bench, known, rounds),
            **await added_to_first_tokens(bench, checker, known, rounds),
            "bomb": await beside_bombs(bench, checker, known, rounds, bomb_members),
        }


async def added_to_steps(bench: Bench, known: str, rounds: int) -> dict[str, Any]:
    await bench.itls([known])
    free, bound = list[float](), list[float]()
    for number in range(2 * rounds):
        for grammar in ("", known)[:: 1 if number % 2 else -1]:  # each follows the other as often
            (bound if grammar else free).append(statistics.median(await bench.itls([grammar] * 32)))
    itl = {"free": ms(statistics.median(free)), "constrained": ms(statistics.median(bound))}
    return {"step_ms": itl, "step_growth": growth(free, bound)}


async def added_to_first_tokens(
    bench: Bench, checker: GrammarChecker, known: str, rounds: int
) -> dict[str, Any]:
    first = {"free": list[float](), "known": list[float](), "new": list[float]()}
    for number in range(8 * rounds + 2):
        turns = [("free", ""), ("known", known), ("new", new_schema(number))]
        for _ in range(number % 3):  # each comes behind each other one
            turns.append(turns.pop(0))
        for kind, grammar in turns[:: 1 if number % 2 else -1]:
            first[kind].append(await bench.ttft(grammar, checker))
    return {
        "first_token_ms": {kind: ms(statistics.median(took)) for kind, took in first.items()},
        "first_token_p90_ms": {kind: ms(quantile(took, 0.9)) for kind, took in first.items()},
        "known_adds_ms": ms(statistics.median(first["known"]) - statistics.median(first["free"])),
        "new_adds_p90_ms": ms(quantile(first["new"], 0.9) - quantile(first["free"], 0.9)),
    }


async def beside_bombs(
    bench: Bench, checker: GrammarChecker, known: str, rounds: int, num_members: int
) -> dict[str, Any]:
    ends = {"refused": 0, "answered": 0}
    waited = [0.5]
    """Seconds from one answered bomb's last token until the next one is compiled."""

    async def bombs() -> None:
        began = time.perf_counter()
        for number in range(10**9):
            for bomb in (members_schema(number, num_members), branches_schema(number, num_members // 8)):
                try:
                    await checker.check(bomb, "response_format")
                except RequestError:
                    ends["refused"] += 1
                else:
                    waited.append(time.perf_counter() - began)
                    await bench.ended[bench.add(16, 8, bomb)]
                    began = time.perf_counter()
                    ends["answered"] += 1

    async def others() -> None:
        while True:
            await asyncio.sleep(statistics.median(waited))
            await bench.ended[bench.add(16, 8)]

    beside = {"quiet": lambda: asyncio.sleep(0), "loud": bombs, "others": others, "busy": busy}
    found = {kind: list[float]() for kind in beside}
    for number in range(2 * rounds):
        kinds = [*beside]
        for _ in range(number % len(kinds)):  # each comes behind each other one
            kinds.append(kinds.pop(0))
        for kind in kinds[:: 1 if number % 2 else -1]:
            task = asyncio.create_task(beside[kind]())
            found[kind].append(quantile(await bench.itls(["", known] * 8), 0.99))
            task.cancel()
            for failed in await asyncio.gather(task, return_exceptions=True):
                if isinstance(failed, Exception):  # not that it was cancelled
                    raise failed
    p99 = {f"{kind}_p99_ms": ms(statistics.median(each)) for kind, each in found.items()}
    return {
        **p99,
        "growth": growth(found["quiet"], found["loud"]),
        "growth_beside_others": growth(found["quiet"], found["others"]),
        "growth_by_others": growth(found["others"], found["loud"]),
        "growth_beside_a_busy_loop": growth(found["quiet"], found["busy"]),
        "schemas": ends,
    }


def growth(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the median of the rounds' ratios, less one."""
    return round(statistics.median(b / a for a, b in zip(before, after, strict=True)) - 1, 4)


async def busy() -> None:
    """Another process that computes without end: what anything at all on the other core costs here."""
    loop = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
    try:
        await loop.wait()
    finally:
        loop.kill()
        await loop.wait()


def members_schema(number: int, count: int) -> str:
    members = {f"p{number}_{i}": {"type": "string"} for i in range(count)}
    return schema_grammar({"type": "object", "properties": members})


def branches_schema(number: int, count: int) -> str:
    names = [f"k{number}_{i}" for i in range(count)]
    branches = [
        {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]} for name in names
    ]
    return schema_grammar({"anyOf": branches})


def ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--rounds", type=int, default=20)
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), args.smoke)
        results = asyncio.run(
            measure(Path(name), args.threads, *((1, 30) if args.smoke else (args.rounds, 3000)))
        )
    print(json.dumps(results, indent=2))
    write(
        args.json,
        f"benchmarks.engine.structured --threads {args.threads} --rounds {args.rounds}",
        {"prediction": PREDICTION, "threads": args.threads, "results": results},
    )


if __name__ == "__main__":
    main()
