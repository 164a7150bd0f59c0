"""What it costs that streams outlive their ingress: ids of events and ids that follow from the request in the ingress, and kept
tokens in the instance.

    python -m benchmarks.serving.resumable_streams [--json FILE] [--pairs 6] [--rounds 3]

Two ingresses, one with `serve.resume_s` of 30 and one of 0, stream in turns to the clients of `benchmarks.serving.streaming`.
The least time on processors of the rounds counts. Two equal processes differ by some per cent for as long as they live, since
memory lies elsewhere; so there are several pairs, and the mean of each way's counts, with its standard error. In the instance
the output of 256 sequences goes through `decode.readers`, to a mail that sends nothing."""

import asyncio
import math
import multiprocessing
import statistics
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import uvloop

from benchmarks.report import parser, write
from benchmarks.serving.streaming import (
    CONFIG,
    STEPS,
    STREAMS,
    TEXT,
    WARM_STEPS,
    Backend,
    Clients,
    ingress,
    processor_s,
)
from cluster.ingress.model_card import read_model_card
from core.clock import WallClock
from core.config.cluster_config import load
from core.messages import Message
from core.types import Request, Resumption, SamplingParams, TokenOut
from decode.readers import Readers
from models.text.tokenizer import load_tokenizer

PREDICTION = (
    "1 us of 30 for a token of a chat in the ingress (3 %), 40 us for a request (8 % of 0.5 ms); 0.2 us for a token in the "
    "instance, of a step of milliseconds"
)
PATH = "/v1/chat/completions"
WAYS: dict[str, float] = {"resumable": 30.0, "not": 0.0}


@asynccontextmanager
async def running(backend: Backend, resume_s: float) -> AsyncGenerator[tuple[int, int]]:
    """(process id, port) of an ingress."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    values: dict[str, Any] = CONFIG | {"serve": {"resume_s": resume_s}}
    process = context.Process(target=ingress, args=(backend.address, theirs, values))
    process.start()
    try:
        port: int = await asyncio.to_thread(ours.recv)
        assert process.pid is not None
        yield process.pid, port
    finally:
        ours.send("over")
        await asyncio.to_thread(process.join)


async def stream(backend: Backend, pid: int, port: int, streams: int, steps: int) -> dict[str, float]:
    """Return the ingress's seconds for a request up to its placing, for a token, and for a request's last token and its end."""
    clients, began_at = Clients(), processor_s(pid)
    connections = await clients.open(port, PATH, streams, steps)
    await backend.have(streams)
    per_request = (processor_s(pid) - began_at) / streams
    warm, last = min(WARM_STEPS, steps // 2), steps - 1
    per_token = 0.0
    for index in range(steps):
        if index in (warm, last):
            per_token, began_at = (processor_s(pid) - began_at) / (streams * (last - warm)), processor_s(pid)
        backend.step(index, index == last)
        # The first event names the role, the last is [DONE].
        await clients.have(streams * (index + 2 + (index == last)))
    per_end = (processor_s(pid) - began_at) / streams
    for connection in connections:
        connection.close()
    return {"request": per_request, "token": per_token, "end": per_end}


Figures = dict[str, dict[str, float]]
"""{way: {what: microseconds}}"""


async def measure(streams: int, steps: int, rounds: int) -> Figures:
    """Return the least figures of one pair of ingresses."""
    card = read_model_card(load(CONFIG, {}))
    backend = Backend(load_tokenizer(card.folder).encode(TEXT, add_special_tokens=False))
    least: Figures = {}
    async with running(backend, WAYS["resumable"]) as one, running(backend, WAYS["not"]) as other:
        for _ in range(rounds + 1):
            for way, (pid, port) in zip(WAYS, (one, other), strict=True):
                seconds = await stream(backend, pid, port, streams, steps)
                found = {what: 1e6 * one for what, one in seconds.items()}
                found["kept token"] = kept_token_us(WAYS[way])
                before = least.get(way, found)
                least[way] = {what: min(found[what], before[what]) for what in found}
    await backend.close()
    return least


def summed_up(pairs: Sequence[Figures]) -> dict[str, Any]:
    """Return each way's mean in us, what resuming adds to it, and the standard error of that."""
    us = {
        way: {what: statistics.mean(pair[way][what] for pair in pairs) for what in pairs[0][way]}
        for way in WAYS
    }
    added: dict[str, float] = {}
    errors: dict[str, float] = {}
    for what, without in us["not"].items():
        each = [(pair["resumable"][what] - pair["not"][what]) / without for pair in pairs]
        added[what] = statistics.mean(each)
        errors[what] = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else math.nan
    return {"us": us, "added": added, "standard_error": errors}


class _NoMail:
    address = "decode"

    def send(self, to: str, message: Message) -> None: ...


def kept_token_us(keep_s: float) -> float:
    """Return what an instance's bookkeeping of one token takes."""
    readers = Readers(_NoMail(), WallClock(), lambda _: None)  # type: ignore[arg-type]
    resumption = Resumption(stream="s", owner="", keep_s=keep_s) if keep_s else None
    names = [f"r{number}" for number in range(STREAMS)]
    for name in names:
        request = Request(
            id=name, prompt=(1,), sampling=SamplingParams(), reply_to="f", resumption=resumption
        )
        readers.open(request)
    steps = [
        [TokenOut(request_id=name, attempt=0, index=index, token=7) for name in names]
        for index in range(STEPS)
    ]
    began_at = time.process_time()
    for step in steps:
        readers.send(step)
    return 1e6 * (time.process_time() - began_at) / (STREAMS * STEPS)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--pairs", type=int, default=6)
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    streams, steps, rounds, num_pairs = (
        (4, 6, 0, 1) if args.smoke else (STREAMS, STEPS, args.rounds, args.pairs)
    )
    pairs: list[Figures] = []
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for number in range(num_pairs):
            pairs.append(runner.run(measure(streams, steps, rounds)))
            token = {way: f"{found['token']:.2f}" for way, found in pairs[-1].items()}
            print(f"pair {number}: us a token {token}")
    results = summed_up(pairs)
    for what, share in results["added"].items():
        us = " ".join(f"{way} {found[what]:.2f}" for way, found in results["us"].items())
        print(f"{what:12s} {us} us, {100 * share:+.1f} % +- {100 * results['standard_error'][what]:.1f}")
    write(
        args.json,
        "benchmarks.serving.resumable_streams",
        {"prediction": PREDICTION, "streams": streams, "pairs": num_pairs, **results},
    )


if __name__ == "__main__":
    main()
