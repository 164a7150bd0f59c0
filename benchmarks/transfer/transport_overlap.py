"""How much of a KV transfer hides behind prefill: the production pusher, mail, inbox and transports between two processes.

    python -m benchmarks.transfer.transport_overlap [--json FILE] [--requests N] [--only shm,tcp]

KV is shaped like Llama-3.1-8B's (32 layers, 4 KiB for a token of a layer), prompts are computed in chunks of 512 tokens. The
device is modelled by sleeping (a GPU leaves the processor alone): a layer takes `ratio` times as long as its KV takes on the
link, which is measured first, in the same run; `h100` stands for 20,000 tokens/s. A layer's KV is ready after its QKV projection
(12 % of a layer's operations in that model), which is when the runner tells the pusher.

`exposed` is the transfer's part: from the moment when decode knows the first token (the Commit) to the one when the last byte is
there; hidden share = 1 - exposed / time that writes were under way; `exposed_of_ttft` relates it to prefill's duration, the least
that TTFT can be. `handover` is from the sample to the moment when decode could go on: it has the Commit's way in it, which any
message with the token would take, and `hidden_share_with_message` is by that."""

import asyncio
import mmap
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.report import parser, write
from benchmarks.transfer.transport_raw import gone_with_the_writer
from core.kv import KVLayout, KVShard, num_blocks_for
from core.messages import ChunkDone, Commit, Grant, Message, RegionKey
from core.plan import KVPush, SeqWork, StepPlan
from core.types import TokenOut
from kvtransfer.copies import CopyRun
from kvtransfer.inbox import Inbox
from kvtransfer.pusher import Pusher
from kvtransfer.transport.base import Carried, Receiver, Sender
from kvtransfer.transport.shm import SharedSegment, ShmReceiver, ShmSender
from kvtransfer.transport.tcp import TcpReceiver, TcpSender
from kvtransfer.transport.write_admission import WriteAdmission
from net.mail import TcpMail

PREDICTIONS = {
    "hidden": "from ratio 2 on the last layer's KV is gone before that layer has been computed, and the Commit follows it: "
    "nothing is exposed over shm, whose bytes are told on the Commit's own connection; over tcp a reader's thread may be later, "
    "0.1 ms at most. At ratio 1 a queue is left: one or two layers",
    "handover": "a message between two event loops: 0.2 to 0.3 ms",
}
KEY = b"benchmark"
CHUNK_TOKENS = 512
PROMPTS = [512, 2048, 4096]
RATIOS = [1.0, 2.0, 4.0]
H100_TOKENS_PER_S = 20_000
KV_READY = 0.12
"""The share of a layer's time: 4096 x 6144 of its 218 million multiplications."""
LAYOUT = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
SHARD = KVShard.whole(LAYOUT)
NUM_BLOCKS = PROMPTS[-1] // LAYOUT.block_size
LAYER_CHUNK_BYTES = CHUNK_TOKENS // LAYOUT.block_size * SHARD.block_bytes


def holder(pipe: Any) -> None:
    """The decode side: grants on request, and tells when each grant was complete."""

    async def main(segment: SharedSegment) -> None:
        mail = TcpMail(KEY)
        committed_at: dict[str, float] = {}
        inbox = Inbox(
            SHARD,
            NUM_BLOCKS,
            mail.address,
            "d1",
            on_complete=lambda commit: pipe.send(
                (commit.grant_id, committed_at.pop(commit.grant_id), time.monotonic())
            ),
            on_corrupted=lambda _: None,
        )

        def on_message(sender: str, message: Message) -> None:
            match message:
                case ChunkDone(grant_id=grant_id, seq=_, first_token=_, num_tokens=_, num_bytes=num_bytes):
                    inbox.arrived(grant_id, num_bytes)
                case Commit(grant_id=grant_id):
                    committed_at[grant_id] = time.monotonic()
                    inbox.committed(message)
                case _:
                    raise AssertionError(message)

        mail.listen(on_message, lambda _: None)
        admission = WriteAdmission(inbox.may_write, inbox.arrived, inbox.corrupted)
        receivers: list[Receiver] = [
            ShmReceiver(segment),
            TcpReceiver(KEY, mail.me, "127.0.0.1", segment.buffer, admission),
        ]
        inbox.attach(receivers)
        number = 0
        while (num_tokens := await asyncio.to_thread(pipe.recv)) is not None:
            number += 1
            blocks = range(num_blocks_for(num_tokens, LAYOUT.block_size))
            pipe.send(
                inbox.open(
                    f"r{number}#0", 0, "writer", list(blocks), first_token=0, num_tokens=num_tokens, ttl_s=60
                )
            )
        await inbox.shut()
        await mail.close()

    with gone_with_the_writer(SHARD.pool_bytes(NUM_BLOCKS)) as segment:
        asyncio.run(main(segment))


class Timed:
    """A sender that adds up how long its writes took."""

    def __init__(self, inner: Sender) -> None:
        self._inner, self.name, self.vouches = inner, inner.name, inner.vouches
        self.busy_s = 0.0
        """While at least one was under way."""
        self._num_under_way, self._since = 0, 0.0

    def reaches(self, region: RegionKey) -> bool:
        return self._inner.reaches(region)

    async def write(self, grant_id: str, region: RegionKey, runs: Sequence[CopyRun]) -> None:
        if not self._num_under_way:
            self._since = time.monotonic()
        self._num_under_way += 1
        await self._inner.write(grant_id, region, runs)
        self._num_under_way -= 1
        if not self._num_under_way:
            self.busy_s += time.monotonic() - self._since

    def carried(self, region: RegionKey) -> Carried | None:
        return self._inner.carried(region)

    async def probe(self, region: RegionKey, num_bytes: int) -> int:
        return await self._inner.probe(region, num_bytes)

    def ended(self, grant_id: str) -> None:
        self._inner.ended(grant_id)

    def forget(self, endpoint_owner: str) -> None:
        self._inner.forget(endpoint_owner)

    async def close(self) -> None:
        await self._inner.close()


class Prefill:
    """The writer: `serve` computes one prompt, layer by layer, on a thread of its own."""

    def __init__(self, pipe: Any, mail: TcpMail, sender: Timed) -> None:
        self._pipe, self._sender = pipe, sender
        self._pusher = Pusher(SHARD, NUM_BLOCKS, mail, [sender])

    async def grant(self, num_tokens: int) -> Grant:
        self._pipe.send(num_tokens)
        return await asyncio.to_thread(self._pipe.recv)

    async def serve(self, num_tokens: int, layer_s: float) -> tuple[float, float, float, float]:
        """Seconds of prefill, of writing, exposed, and from the sample until decode can go on."""
        grant = await self.grant(num_tokens)
        self._sender.busy_s = 0.0
        delivered = asyncio.Event()

        def failed(_: str, why: str) -> None:
            raise RuntimeError(why)

        self._pusher.open(grant, lambda _: delivered.set(), lambda _: None, failed)
        started, ended = await asyncio.to_thread(self._compute, grant, num_tokens, layer_s)
        self._pusher.finish(grant.id, [TokenOut(request_id="r", attempt=0, index=0, token=1)])
        await delivered.wait()
        grant_id, committed, complete = await asyncio.to_thread(self._pipe.recv)
        assert grant_id == grant.id
        return ended - started, self._sender.busy_s, complete - committed, complete - ended

    def _compute(self, grant: Grant, num_tokens: int, layer_s: float) -> tuple[float, float]:
        started = time.monotonic()
        blocks = tuple(range(NUM_BLOCKS))
        for start in range(0, num_tokens, CHUNK_TOKENS):
            count = min(CHUNK_TOKENS, num_tokens - start)
            work = SeqWork(
                key="r#0",
                start=start,
                count=count,
                block_ids=blocks,
                samples=False,
                push=KVPush(grant.id, start, count),
            )
            layer_done = self._pusher.step_started(StepPlan(step=0, new=(), copies=(), work=(work,), drop=()))
            for layer in range(LAYOUT.num_layers):
                time.sleep(layer_s * KV_READY)
                assert layer_done is not None
                layer_done(0, layer)
                time.sleep(layer_s * (1 - KV_READY))
        return started, time.monotonic()

    async def close(self) -> None:
        await self._pusher.close()


async def link_rate(prefill: Prefill) -> float:
    """Bytes per second of layer-sized writes, one after the other: everything is ready at once."""
    best = 0.0
    for _ in range(4):
        _, busy_s, _, _ = await prefill.serve(2048, 0.0)
        best = max(best, LAYER_CHUNK_BYTES * LAYOUT.num_layers * 4 / busy_s)
    return best


async def measure(
    pipe: Any, only: Sequence[str], prompts: Sequence[int], ratios: Sequence[float], num_requests: int
) -> dict[str, Any]:
    results: dict[str, Any] = {}
    source = memoryview(mmap.mmap(-1, SHARD.pool_bytes(NUM_BLOCKS)))
    source[:] = bytes(range(256)) * (len(source) // 256)
    for name in only:
        mail = TcpMail(KEY)
        mail.listen(lambda *_: None, lambda _: None)
        sender: Sender = (
            ShmSender(source) if name == "shm" else TcpSender(KEY, mail.me, source, checksum=False)
        )
        prefill = Prefill(pipe, mail, Timed(sender))
        rate = await link_rate(prefill)
        rows: list[dict[str, Any]] = []
        for num_tokens in prompts:
            for pace in ("h100", *ratios):
                row = await measure_pace(prefill, num_tokens, pace, LAYER_CHUNK_BYTES / rate, num_requests)
                rows.append(row)
                rounded = {key: v if isinstance(v, str) else round(v, 4) for key, v in row.items()}
                print(name, f"{rate / 1e9:.2f} GB/s", rounded, flush=True)
        results[name] = {"link_gb_s": rate / 1e9, "rows": rows}
        await prefill.close()
        await mail.close()
    return results


async def measure_pace(
    prefill: Prefill, num_tokens: int, pace: float | str, link_s: float, num_requests: int
) -> dict[str, Any]:
    """`pace` is how long a layer of a chunk takes to compute: as on an H100, or so many times `link_s`, which the link takes for
    its KV. Returns medians over the requests."""
    h100_s = CHUNK_TOKENS / H100_TOKENS_PER_S / LAYOUT.num_layers
    layer_s = h100_s if isinstance(pace, str) else link_s * pace
    runs = [await prefill.serve(num_tokens, layer_s) for _ in range(num_requests)]
    prefill_s, busy_s, exposed_s, handover_s = (
        statistics.median(column) for column in zip(*runs, strict=True)
    )
    return {
        "num_tokens": num_tokens,
        "pace": pace,
        "ratio": layer_s / link_s,
        "prefill_ms": prefill_s * 1e3,
        "writing_ms": busy_s * 1e3,
        "exposed_ms": exposed_s * 1e3,
        "handover_ms": handover_s * 1e3,
        "hidden_share": statistics.median(1 - exposed / busy for _, busy, exposed, _ in runs),
        "hidden_share_with_message": statistics.median(1 - whole / busy for _, busy, _, whole in runs),
        "exposed_of_ttft": exposed_s / prefill_s,
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=12)
    options.add_argument("--only", default="shm,tcp")
    args = options.parse_args()
    sizes = ([512], [2.0], 1) if args.smoke else (PROMPTS, RATIOS, args.requests)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=holder, args=(theirs,), daemon=True)
    process.start()
    results = asyncio.run(measure(ours, args.only.split(","), *sizes))
    ours.send(None)
    process.join(10)
    write(
        args.json, "benchmarks.transfer.transport_overlap", {"predictions": PREDICTIONS, "results": results}
    )


if __name__ == "__main__":
    main()
