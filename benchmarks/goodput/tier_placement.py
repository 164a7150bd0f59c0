"""How much of a conversation's prompt is spared when its KV has left the device's pool for host memory.

    python -m benchmarks.goodput tier_placement [--json FILE] [--rounds N]

Four local instances of any role serve 256 conversations of four turns, eight at a time. Between two turns of one at least 128
others have theirs, twice what the pools have room for; host memory has room for all. The production scheduler, engine and
tiers; the device computes nothing, and its steps last as long as the simulator's (20,000 prompt tokens a second). In turns:
schedulers told of the device's blocks alone, as before, and of those below, too. Shares are of all prompt tokens; 69 % could be
spared. Reading blocks that are as small as these takes next to nothing, so times to the first token say what placement gains."""

import asyncio
import mmap
import random
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from benchmarks.report import parser, write
from cluster.ingress.delivery.frontend import Frontend
from cluster.instance.instance_parts import InstanceParts, Role
from cluster.local import LocalCluster
from core.clock import WallClock
from core.config.cluster_config import load
from core.kv import KVLayout, KVShard, RankPool
from core.plan import StepPlan, StepResult
from core.ports import LayerSink
from core.types import Request, SamplingParams
from engine.tiers.build_tiers import build_tiers
from engine.tiers.held_blocks import CacheEvents, HeldBlocks
from kvtransfer.inbox import Inbox
from kvtransfer.transport.base import Receiver
from kvtransfer.transport.loopback_transport import LoopbackFabric, LoopbackReceiver, LoopbackSender
from net.loopback_mail import LoopbackMail, LoopbackNetwork
from sim.catalogue.cost import StepCost
from sim.modelled import ModelledGroup

PREDICTION = (
    "told of the device alone, 28 % of the prompt tokens are spared: a conversation finds its KV with a chance of one in four, "
    "and leaves older copies wherever it was; told of what lies below, 66 %, and the median time to the first token of a turn "
    "that returns falls by 60 %"
)
SHARD = KVShard.whole(KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="bfloat16"))
NUM_INSTANCES, NUM_BLOCKS, HOST_BLOCKS, VOCAB_SIZE = 4, 1024, 8192, 32_000
CONVERSATIONS, TURNS, AT_ONCE = 256, 4, 8
FIRST_TOKENS, NEXT_TOKENS, OUTPUT_TOKENS = 1000, 200, 16


class CountingGroup(ModelledGroup):
    """Tells how many prompt tokens its steps compute."""

    def __init__(self, sink: LayerSink | None, computed: Callable[[int], None]) -> None:
        super().__init__(WallClock(), StepCost(), SHARD.num_layers, VOCAB_SIZE, sink)
        self._computed = computed

    async def execute(self, plan: StepPlan) -> StepResult:
        self._computed(plan.size.num_prompt)
        return await super().execute(plan)


def of_the_device_alone(device: CacheEvents, lies_below: Callable[[bytes], bool]) -> HeldBlocks:
    del lies_below
    return HeldBlocks(device, lambda _: False)


class Served:
    """A cluster, and what it has done."""

    def __init__(self) -> None:
        self.num_computed = 0
        self._fabric = LoopbackFabric()
        self._config = load(
            None,
            {},
            {
                "prefill_instances": 0,
                "decode_instances": NUM_INSTANCES,
                "any_role": True,
                "engine.host_cache_bytes": HOST_BLOCKS * SHARD.pool_bytes(1),
                "engine.device": "cpu",
            },
        )

    def cluster(self):
        return LocalCluster.assembled(self._config, LoopbackNetwork().join, self._parts)

    def _parts(self, role: Role, mail: LoopbackMail) -> InstanceParts:
        del role
        memory = memoryview(mmap.mmap(-1, SHARD.pool_bytes(NUM_BLOCKS)))

        def receivers(inbox: Inbox) -> list[Receiver]:
            return [LoopbackReceiver(self._fabric, mail.address, memory, inbox.may_write, inbox.arrived)]

        return InstanceParts(
            shard=SHARD,
            num_blocks=NUM_BLOCKS,
            max_context_tokens=1 << 16,
            make_receivers=receivers,
            make_senders=lambda: [LoopbackSender(self._fabric, memory)],
            make_group=lambda sink: CountingGroup(sink, self._computed),
            host="benchmark",
            tiers=build_tiers(
                self._config.engine, memory, [RankPool(shard=SHARD, num_blocks=NUM_BLOCKS)], "benchmark"
            ),
        )

    def _computed(self, num_tokens: int) -> None:
        self.num_computed += num_tokens


class Conversation:
    def __init__(self, number: int, rng: random.Random) -> None:
        self.number, self._rng = number, rng
        self.tokens: tuple[int, ...] = ()

    async def turn(self, frontend: Frontend) -> float:
        """Have one turn. Returns the seconds to its first token."""
        count = NEXT_TOKENS if self.tokens else FIRST_TOKENS
        self.tokens += tuple(self._rng.randrange(1, VOCAB_SIZE) for _ in range(count))
        request = Request(
            id=frontend.new_request_id(),
            prompt=self.tokens,
            sampling=SamplingParams(temperature=1.0, seed=self.number, max_tokens=OUTPUT_TOKENS),
            reply_to=frontend.address,
        )
        start_at, first_s = time.perf_counter(), 0.0
        async for token in frontend.generate(request):
            first_s = first_s or time.perf_counter() - start_at
            self.tokens += (token.token,)
        return first_s


async def one_run(seed: int, num_conversations: int, num_turns: int) -> dict[str, Any]:
    served, rng = Served(), random.Random(seed)
    talks = [Conversation(number, random.Random(rng.random())) for number in range(num_conversations)]
    half = num_conversations // 2
    spared: list[float] = []
    returning_s: list[float] = []
    num_prompt = 0
    async with served.cluster() as cluster:
        for turn in range(num_turns):
            before, asked = served.num_computed, num_prompt
            todo = iter(rng.sample(talks[:half], half) + rng.sample(talks[half:], num_conversations - half))

            async def work() -> None:
                nonlocal num_prompt
                for talk in todo:  # noqa: B023  # the turn ends with them
                    first_s = await talk.turn(cluster.frontend)
                    num_prompt += len(talk.tokens) - OUTPUT_TOKENS
                    if turn:  # noqa: B023
                        returning_s.append(first_s)

            await asyncio.gather(*(work() for _ in range(AT_ONCE)))
            spared.append(1 - (served.num_computed - before) / (num_prompt - asked))
    return {
        "spared": 1 - served.num_computed / num_prompt,
        "spared_by_turn": spared,
        "returning_ttft_ms": 1e3 * statistics.median(returning_s),
    }


def measure(rounds: int, num_conversations: int, num_turns: int) -> dict[str, list[dict[str, Any]]]:
    told: dict[str, Any] = {"the device alone": of_the_device_alone, "tiers too": HeldBlocks}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in told}
    for seed in range(rounds):
        for name, make in told.items():
            with patch("engine.tiers.restoring.HeldBlocks", make):
                row = asyncio.run(one_run(seed, num_conversations, num_turns))
            found[name].append(row)
            print(name, row, flush=True)
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3)
    args = options.parse_args()
    rounds, *sizes = (1, 8, 2) if args.smoke else (args.rounds, CONVERSATIONS, TURNS)
    rows = measure(rounds, *sizes)
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in ("spared", "returning_ttft_ms")}
        for name, runs in rows.items()
    }
    print(medians)
    content = {"prediction": PREDICTION, "results": medians, "runs": rows}
    write(args.json, "benchmarks.goodput tier_placement", content)


if __name__ == "__main__":
    main()
