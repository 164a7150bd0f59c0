"""A whole cluster on one GPU, with made-up weights: `python -m benchmarks.gpu.serving --json FILE` (one GPU, two minutes).

Hand-over: the same prompts of 1,024 tokens, one at a time and sixteen at a time, by an instance that does everything and by a
prefill and a decode instance, each in a process of its own, which share the card (ADR 046) and hand over by CUDA IPC. What a
client waits for a transfer is the difference of the times to the first token, alone. Where an MPS daemon listens, or one can be
started, the two do it again with their shares of the processors bounded: without it their kernels take turns. Offline: 1,000
prompts at once with lengths like ShareGPT's, on one instance that does everything.

Predicted, before anything was run on a GPU: the large model's steps are bound by the bandwidth up to 128 sequences, and prompts
take a fifth of the time: 12,000 output tokens per second, as vLLM has on an H100 (12,553; SGLang 16,215). A hand-over of 1,024
tokens moves 128 MiB within the card, layer by layer beside the computation: exposed are the last layer's 4 MiB and two
messages, 0.3 ms, which is 1 % of the 30 ms of prefill. Sixteen at a time, the two processes take turns and have 1.3 times the gap
between tokens of one instance for everything, whose prompts hold up its tokens as well; with MPS as long a gap, and a time to the
first token that is 1.5 times as long, since prompts have 0.6 of the processors.

`TRITON_INTERPRET=1 python -m benchmarks.gpu.serving --interpret-smoke` runs it once, tiny, without a GPU: its times mean
nothing."""

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from benchmarks.gpu import apart
from benchmarks.gpu.mps_daemon import mps_daemon
from benchmarks.gpu.session import Results, Row, Verdict, begin, parser
from benchmarks.gpu.shapes import SHAPES, Shape, describe
from cluster.ingress.delivery.frontend import Frontend
from core.types import Request, SamplingParams, Slo
from kernels.triton.platform import INTERPRETED

NUM_OFFLINE = 4 if INTERPRETED else 1000
PROMPT_TOKENS, NUM_OUTPUT = (24, 4) if INTERPRETED else (1024, 64)
NUM_ALONE, NUM_TOGETHER, WIDTH = (1, 2, 2) if INTERPRETED else (12, 48, 16)
SHAREGPT_MEDIANS, SHAREGPT_SIGMAS, LONGEST = (
    ((8, 4), (0.5, 0.5), 16) if INTERPRETED else ((90, 140), (1.4, 1.1), 1024)
)
"""The lengths of prompts and outputs, as lognormal distributions that are cut at `LONGEST`: some 200 tokens each in the mean."""
_REPORTED_S = 1.0
"""Instances have reported what they have done after so long."""
_COMPARED = 8
"""The first tokens of an answer. Later ones follow from them, and batches of other sizes may round otherwise."""
WHOLE, APART, BOUNDED = (
    "one for everything",
    "prefill and decode",
    "prefill and decode, processors bounded",
)
BATCH = Slo(name="batch", ttft_s=3600.0, tpot_s=10.0, priority=-1)


@dataclass(slots=True)
class Answer:
    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list[float])
    tokens: list[int] = field(default_factory=list[int])


def values_of(
    folder: Path, context_tokens: int, sm_shares: tuple[float, float] | None = None
) -> apart.Values:
    """`sm_shares`: the most that a prefill and a decode instance use of the card's processors; None: one for everything."""
    values: dict[str, Any] = {
        "model": {"path": str(folder), "load_format": "dummy", "max_context_tokens": context_tokens},
        "prefill_instances": int(sm_shares is not None),
        "decode_instances": 1,
        "schedule": {"max_queued_requests": 4096},
    }
    values["engine"] = {"kv_bytes": 1 << 20} if INTERPRETED else {"device": "cuda"}
    if sm_shares is None:
        return values
    values["schedule"]["local_threshold_tokens"] = 0
    if not INTERPRETED:
        prefill, decode = sm_shares
        values["prefill"] = {"gpu_share": 0.45, "sm_share": prefill}
        values["decode"] = {"gpu_share": 0.55, "sm_share": decode}
        values["transfer"] = {"transport": "cuda_ipc"}
    return values


async def answer(frontend: Frontend, prompt: tuple[int, ...], num_tokens: int) -> Answer:
    """With exactly `num_tokens` tokens: made-up weights end nothing."""
    got, started = Answer(), time.perf_counter()
    request = Request(
        id=frontend.new_request_id(),
        prompt=prompt,
        sampling=SamplingParams(temperature=0.0, max_tokens=num_tokens),
        reply_to=frontend.address,
        slo=BATCH,
    )
    last = started
    async for one in frontend.generate(request):
        now = time.perf_counter()
        if got.tokens:
            got.gaps_s.append(now - last)
        else:
            got.ttft_s = now - started
        got.tokens.append(one.token)
        last = now
    return got


async def in_turns(
    frontend: Frontend, prompts: Sequence[tuple[int, ...]], width: int, num_tokens: int
) -> list[Answer]:
    """`width` at any time."""
    left, got = list(prompts), list[Answer]()

    async def client() -> None:
        while left:
            got.append(await answer(frontend, left.pop(), num_tokens))

    async with asyncio.TaskGroup() as clients:
        for _ in range(width):
            clients.create_task(client())
    return got


def offline_load(shape: Shape) -> list[tuple[tuple[int, ...], int]]:
    """Return (prompt, number of output tokens) of each request."""
    lengths = random.Random(0)

    def drawn(kind: int) -> int:
        one = lengths.lognormvariate(0, SHAREGPT_SIGMAS[kind]) * SHAREGPT_MEDIANS[kind]
        return min(LONGEST, max(4, round(one)))

    return [(prompt_of(lengths, shape, drawn(0)), drawn(1)) for _ in range(NUM_OFFLINE)]


async def offline(shape: Shape, folder: Path) -> Row:
    work = offline_load(shape)
    async with apart.running(values_of(folder, 2 * LONGEST)) as frontend:
        await answer(frontend, work[0][0], 4)  # what is compiled when it is first needed
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(frontend, *one)) for one in work]
        wall_s = time.perf_counter() - started
    num_output = sum(len(task.result().tokens) for task in tasks)
    return {
        "requests": NUM_OFFLINE,
        "prompt_tokens": sum(len(prompt) for prompt, _ in work),
        "output_tokens": num_output,
        "wall_s": wall_s,
        "output_tokens_per_s": num_output / wall_s,
    }


async def served(shape: Shape, folder: Path, sm_shares: tuple[float, float] | None) -> Row:
    """One at a time, then `WIDTH` at a time."""
    contents = random.Random(1)
    async with apart.running(values_of(folder, PROMPT_TOKENS + NUM_OUTPUT, sm_shares)) as frontend:
        await in_turns(frontend, _prompts(contents, shape, WIDTH), WIDTH, NUM_OUTPUT)
        alone = await in_turns(frontend, _prompts(contents, shape, NUM_ALONE), 1, NUM_OUTPUT)
        started = time.perf_counter()
        together = await in_turns(frontend, _prompts(contents, shape, NUM_TOGETHER), WIDTH, NUM_OUTPUT)
        wall_s = time.perf_counter() - started
        await asyncio.sleep(_REPORTED_S)
        work = [one.work for one in (await frontend.status()).instances]
    return {
        "handed_over": sum(one.grants for one in work),
        "replayed_steps": sum(one.replayed_steps for one in work) / sum(one.steps for one in work),
        "together_requests_per_s": NUM_TOGETHER / wall_s,
        "tokens_alone": [one.tokens[:_COMPARED] for one in alone],
        "ttft_alone_ms": _median_ms([one.ttft_s for one in alone]),
        "itl_alone_ms": _median_ms([gap for one in alone for gap in one.gaps_s]),
        "ttft_together_ms": _median_ms([one.ttft_s for one in together]),
        "itl_together_ms": _median_ms([gap for one in together for gap in one.gaps_s]),
    }


def prompt_of(contents: random.Random, shape: Shape, length: int) -> tuple[int, ...]:
    return tuple(contents.randrange(4, shape.vocab) for _ in range(length))


def _prompts(contents: random.Random, shape: Shape, count: int) -> list[tuple[int, ...]]:
    return [prompt_of(contents, shape, PROMPT_TOKENS) for _ in range(count)]


def _median_ms(times_s: list[float]) -> float:
    return 1e3 * statistics.median(times_s)


def verdicts(rows: dict[str, Row]) -> list[Verdict]:
    found: list[Verdict] = []
    if "offline" in rows:
        rate = rows["offline"]["output_tokens_per_s"]
        found.append(Verdict("offline, 8B, output tokens per second, beside SGLang's", rate, 16215.0))
    if WHOLE in rows and APART in rows:
        whole, apart_ = (rows[name]["ttft_alone_ms"] for name in (WHOLE, APART))
        exposed = max(0.0, apart_ - whole) / apart_
        found.append(Verdict("transfer that a client waits for, of TTFT", exposed, 0.005, at_least=False))
        said = (itertools.chain(*rows[name]["tokens_alone"]) for name in (WHOLE, APART))
        pairs = list(zip(*said, strict=True))
        alike = sum(one == other for one, other in pairs) / len(pairs)
        found.append(Verdict("tokens alone, apart as by one instance", alike, 0.99))
        handed_over = float(rows[APART]["handed_over"])
        found.append(Verdict("requests that were handed over", handed_over, NUM_ALONE))
    return found


def main() -> None:
    args = parser(__doc__).parse_args()
    results = Results(args.json, "benchmarks.gpu.serving", begin(args.interpret_smoke), verdicts)
    shape = SHAPES[0]
    with TemporaryDirectory() as name:
        folder = describe(shape, Path(name))

        def bounded() -> Row:
            with mps_daemon():
                return uvloop.run(served(shape, folder, (0.6, 0.4)))

        made = {
            WHOLE: lambda: uvloop.run(served(shape, folder, None)),
            APART: lambda: uvloop.run(served(shape, folder, (1.0, 1.0))),
            "offline": lambda: uvloop.run(offline(shape, folder)),
        } | ({} if INTERPRETED else {BOUNDED: bounded})
        for row in results.missing(made):
            results.make(row, made[row])
    results.end()


if __name__ == "__main__":
    main()
