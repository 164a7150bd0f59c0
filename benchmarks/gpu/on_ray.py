"""`baton serve` on Ray, with its actors on one card: `python -m benchmarks.gpu.on_ray --json FILE` (one GPU, Ray, two minutes).

The OpenAI SDK asks over HTTP, 16 and 128 streams at once: first one process without Ray, then two actors for everything, and then
a prefill and a decode actor, which share the card. All answer with the embedded model and batch-invariant kernels, so that each
text must be that of the first. Then one of the actors is killed under 16 streams, which must end as they would have.

Predicted, before it was run on a GPU: all texts alike; with 16 streams Ray costs 5 % of the gap between tokens, with 128 nothing;
the kill of one of two actors keeps a stream waiting for 1 s.

`TRITON_INTERPRET=1 python -m benchmarks.gpu.on_ray --interpret-smoke` runs it with few streams on the CPU."""

import asyncio
import hashlib
import random
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import openai

from benchmarks.gpu.session import Results, Row, Verdict, begin, parser
from kernels.triton.platform import INTERPRETED
from tests.e2e.cluster_process import ServeProcess, serving

WIDTHS, NUM_TOKENS = ((2, 4), 64) if INTERPRETED else ((16, 128), 128)
ALONE, WHOLE, APART = "one process without Ray", "two actors for everything", "prefill and decode actors"
WAYS: dict[str, tuple[Sequence[str], Sequence[str], str]] = {
    ALONE: (("--local",), ("prefill_instances=0",), ""),
    WHOLE: ((), ("prefill_instances=0", "decode_instances=2"), "DecodePool"),
    APART: ((), (), "PrefillPool"),
}
"""Flags, values, and which pool's first actor is killed."""
ON_CARD = {
    ALONE: (),
    WHOLE: ("decode.gpu_share=0.45",),
    APART: ("prefill.gpu_share=0.45", "decode.gpu_share=0.55", "transfer.transport=cuda_ipc"),
}
"""What a card needs besides."""
_LONGEST_S = 120.0
"""A stream that takes longer has failed."""
_WORDS = (
    "the",
    "model",
    "reads",
    "a",
    "line",
    "of",
    "code",
    "and",
    "writes",
    "what",
    "it",
    "has",
    "seen",
    "there",
)


def arguments(way: str) -> list[str]:
    """Return those of `baton serve`."""
    flags, values, _ = WAYS[way]
    on_card = () if INTERPRETED else ("engine.device=cuda", *ON_CARD[way])
    alike = ("engine.deterministic=true", "schedule.local_threshold_tokens=0")
    return [*flags, *(word for value in (*alike, *values, *on_card) for word in ("--set", value))]


def prompts(count: int) -> list[str]:
    words = random.Random(0)
    return [" ".join(words.choices(_WORDS, k=words.randint(5, 60))) for _ in range(count)]


class Answers:
    """Texts of streams, and when their pieces came."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        """By prompt."""
        self.ttfts_s: list[float] = []
        self.gaps_s: list[float] = []
        self.begun = asyncio.Event()

    async def ask_all(self, url: str, asked: Sequence[str]) -> None:
        """Ask for all of them at once."""
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=_LONGEST_S) as client,
            asyncio.TaskGroup() as group,
        ):
            for prompt in asked:
                group.create_task(self.ask(client, prompt))

    async def ask(self, client: openai.AsyncOpenAI, prompt: str) -> None:
        text, last = "", time.perf_counter()
        stream = await client.completions.create(
            model="baton-embedded", prompt=prompt, max_tokens=NUM_TOKENS, temperature=0, stream=True
        )
        async for event in stream:
            now = time.perf_counter()
            (self.gaps_s if text else self.ttfts_s).append(now - last)
            text, last = text + event.choices[0].text, now
            self.begun.set()
        self.texts[prompt] = text

    @property
    def digests(self) -> list[str]:
        """What is compared with other ways' answers, in order of the prompts."""
        return [hashlib.sha256(self.texts[one].encode()).hexdigest()[:16] for one in sorted(self.texts)]


async def at_once(url: str, asked: Sequence[str]) -> Answers:
    got = Answers()
    await got.ask_all(url, asked)
    return got


def served(way: str, folder: Path) -> Row:
    started = time.perf_counter()
    with serving(*arguments(way), log=folder / f"{way}.log") as server:
        row: Row = {"openai": openai.__version__, "start_s": time.perf_counter() - started}
        for width in WIDTHS:
            asked = prompts(width)
            asyncio.run(at_once(server.base_url, asked))  # so that steps are known
            began = time.perf_counter()
            got = asyncio.run(at_once(server.base_url, asked))
            row |= {
                f"answers_{width}": got.digests,
                f"requests_per_s_{width}": width / (time.perf_counter() - began),
                f"ttft_ms_{width}": 1e3 * statistics.median(got.ttfts_s),
                f"gap_ms_{width}": 1e3 * statistics.median(got.gaps_s),
            }
        pool = WAYS[way][2]
        return row | (killed(server, pool, row[f"answers_{WIDTHS[0]}"]) if pool else {})


def killed(server: ServeProcess, pool: str, want: list[str]) -> Row:
    """Kill the first actor of a pool under streams, and compare what they say."""
    actor = server.replicas(pool)[0]
    victims = [actor, *actor.children(recursive=True)]

    async def under_streams() -> Answers:
        got = Answers()
        asking = asyncio.create_task(got.ask_all(server.base_url, prompts(WIDTHS[0])))
        await asyncio.wait_for(got.begun.wait(), _LONGEST_S)
        for process in victims:
            process.kill()
        await asking
        return got

    began = time.perf_counter()
    got = asyncio.run(under_streams())
    alike = sum(one == other for one, other in zip(got.digests, want, strict=True)) / len(want)
    longest_s = max([*got.gaps_s, *got.ttfts_s])
    return {"killed_alike": alike, "killed_pause_s": longest_s, "killed_all_s": time.perf_counter() - began}


def verdicts(rows: dict[str, Row]) -> list[Verdict]:
    found: list[Verdict] = []
    for way in (WHOLE, APART):
        if ALONE not in rows or way not in rows:
            continue
        alone, row = rows[ALONE], rows[way]
        for width in WIDTHS:
            pairs = list(zip(alone[f"answers_{width}"], row[f"answers_{width}"], strict=True))
            alike = sum(one == other for one, other in pairs) / len(pairs)
            found.append(Verdict(f"{way}: texts of {width} streams as without Ray", alike, 1.0))
            gaps = row[f"gap_ms_{width}"] / alone[f"gap_ms_{width}"]
            found.append(
                Verdict(f"{way}: gap of {width} streams, of that without Ray", gaps, 1.05, at_least=False)
            )
        found.append(Verdict(f"{way}: texts alike whose actor was killed", row["killed_alike"], 1.0))
        found.append(Verdict(f"{way}: pause when it was, s", row["killed_pause_s"], 1.0, at_least=False))
    return found


def main() -> None:
    args = parser(__doc__).parse_args()
    results = Results(args.json, "benchmarks.gpu.on_ray", begin(args.interpret_smoke), verdicts)
    with TemporaryDirectory() as folder:
        for way in results.missing(WAYS):
            results.make(way, partial(served, way, Path(folder)))
    results.end()


if __name__ == "__main__":
    main()
