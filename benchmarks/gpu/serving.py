"""A whole cluster on one GPU, with made-up weights: `python -m benchmarks.gpu.serving --json FILE` (one GPU, three minutes).

Offline: 1,000 prompts at once with lengths like ShareGPT's, on one instance that does everything. Hand-over: the same prompts of
1,024 tokens, one at a time and sixteen at a time, by that instance and by a prefill and a decode instance in this process, which
hand over within the GPU's host. What a client waits for a transfer is the difference of the times to the first token, alone.

Predicted, before anything was run on a GPU: the large model's steps are bound by the bandwidth up to 128 sequences, and prompts
take a fifth of the time: 12,000 output tokens per second, as vLLM has on an H100 (12,553; SGLang 16,215). A hand-over of 1,024
tokens moves 128 MiB through host memory, layer by layer beside the computation: exposed are the last layer's 4 MiB, 0.3 ms, which
is 1 % of the 30 ms of prefill.

`TRITON_INTERPRET=1 python -m benchmarks.gpu.serving --interpret-smoke` runs it once, tiny, without a GPU: its times mean
nothing."""

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu.session import Verdict, begin, parser, write
from benchmarks.gpu.shapes import SHAPES, Shape, describe
from cluster.ingress.frontend import Frontend
from cluster.local import LocalCluster
from core.config import ClusterConfig, load
from core.types import Request, SamplingParams, Slo
from kernels.triton.platform import INTERPRETED

Row = dict[str, Any]
NUM_OFFLINE = 4 if INTERPRETED else 1000
PROMPT_TOKENS, NUM_OUTPUT = (24, 4) if INTERPRETED else (1024, 64)
NUM_ALONE, NUM_TOGETHER, WIDTH = (1, 2, 2) if INTERPRETED else (16, 64, 16)
SHAREGPT_MEDIANS, SHAREGPT_SIGMAS, LONGEST = (
    ((8, 4), (0.5, 0.5), 16) if INTERPRETED else ((90, 140), (1.4, 1.1), 1024)
)
"""The lengths of prompts and outputs, as lognormal distributions that are cut at `LONGEST`: some 200 tokens each in the mean."""
BATCH = Slo(name="batch", ttft_s=3600.0, tpot_s=10.0, priority=-1)


@dataclass(slots=True)
class Answer:
    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list[float])
    num_tokens: int = 0


def config_of(folder: Path, prefill: int, context_tokens: int) -> ClusterConfig:
    values: dict[str, Any] = {
        "model": {"path": str(folder), "load_format": "dummy", "max_context_tokens": context_tokens},
        "prefill_instances": prefill,
        "decode_instances": 1,
        "schedule": {"max_queued_requests": 4096},
    }
    if INTERPRETED:
        values["engine"] = {"kv_bytes": 1 << 20}
    return load(values, {}, {})


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
    async for _ in frontend.generate(request):
        now = time.perf_counter()
        if got.num_tokens:
            got.gaps_s.append(now - last)
        else:
            got.ttft_s = now - started
        got.num_tokens, last = got.num_tokens + 1, now
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


async def offline(shape: Shape, folder: Path) -> Row:
    lengths = random.Random(0)

    def drawn(kind: int) -> int:
        one = lengths.lognormvariate(0, SHAREGPT_SIGMAS[kind]) * SHAREGPT_MEDIANS[kind]
        return min(LONGEST, max(4, round(one)))

    work = [(prompt_of(lengths, shape, drawn(0)), drawn(1)) for _ in range(NUM_OFFLINE)]
    async with LocalCluster.running(config_of(folder, 0, 2 * LONGEST)) as cluster:
        await answer(cluster.frontend, work[0][0], 4)  # what is compiled when it is first needed
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(cluster.frontend, *one)) for one in work]
        wall_s = time.perf_counter() - started
    num_output = sum(task.result().num_tokens for task in tasks)
    return {
        "requests": NUM_OFFLINE,
        "prompt_tokens": sum(len(prompt) for prompt, _ in work),
        "output_tokens": num_output,
        "wall_s": wall_s,
        "output_tokens_per_s": num_output / wall_s,
    }


async def served(shape: Shape, folder: Path, prefill: int) -> Row:
    """One at a time, then `WIDTH` at a time."""
    contents = random.Random(1)
    async with LocalCluster.running(config_of(folder, prefill, PROMPT_TOKENS + NUM_OUTPUT)) as cluster:
        await in_turns(cluster.frontend, _prompts(contents, shape, WIDTH), WIDTH, NUM_OUTPUT)
        alone = await in_turns(cluster.frontend, _prompts(contents, shape, NUM_ALONE), 1, NUM_OUTPUT)
        together = await in_turns(
            cluster.frontend, _prompts(contents, shape, NUM_TOGETHER), WIDTH, NUM_OUTPUT
        )
    return {
        "instances": "prefill and decode" if prefill else "one for everything",
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


def verdicts(content: Row) -> list[Verdict]:
    found: list[Verdict] = []
    if "offline" in content:
        rate = content["offline"]["output_tokens_per_s"]
        found.append(Verdict("offline, 8B, output tokens per second, beside SGLang's", rate, 16215.0))
    if "exposed" in content:
        found.append(
            Verdict("transfer that a client waits for, of TTFT", content["exposed"], 0.005, at_least=False)
        )
    return found


async def run(shape: Shape, save: Any) -> Row:
    content: Row = {"model": shape.name}
    with TemporaryDirectory() as name:
        folder = describe(shape, Path(name))
        rows = [await served(shape, folder, prefill) for prefill in (0, 1)]
        whole, apart = (row["ttft_alone_ms"] for row in rows)
        content |= {"hand_over": rows, "exposed": max(0.0, apart - whole) / apart}
        save(content, complete=False)
        content["offline"] = await offline(shape, folder)
    return content


def main() -> None:
    args = parser(__doc__).parse_args()
    device = begin(args.interpret_smoke)

    def save(content: Row, complete: bool) -> None:
        write(args.json, "benchmarks.gpu.serving", device, content, verdicts(content), complete=complete)
        for row in content["hand_over"] if not complete else [content["offline"]]:
            print(
                "  ".join(
                    f"{key} {value:.4g}" if isinstance(value, float) else f"{value}"
                    for key, value in row.items()
                )
            )

    save(asyncio.run(run(SHAPES[0], save)), complete=True)


if __name__ == "__main__":
    main()
