"""Recurrent states of instances of several ranks: below their pools, at a buddy, and on the way out of one that drains.

What is said is transformers' own. A state comes back in all ranks or in none."""

import asyncio
import random
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.instance.instance import Instance
from cluster.local import LocalCluster
from core.kv import num_blocks_for
from core.reports import InstanceStatus
from core.types import Request, SamplingParams
from engine.planning.checkpointing import blocks_apart
from engine.tiers.block_digests import prefix_digests, root_digest, state_digests
from models.families.table import read_spec
from tests.models.checkpoints import VOCAB, make
from tests.models.continuation import continuation
from tests.parallel.families import awkward
from tests.parallel.test_served import STATES, ranks, ranks_of, settings
from tests.patience import PATIENCE_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.turns(3),
    pytest.mark.usefixtures("forked"),
]
BLOCK, NUM_PROMPTS = 4, 3
SHORT, LONG = 12, 110
"""Tokens of an answer."""
HOST = {"engine.host_cache_bytes": 1 << 28}
TP2 = pytest.param("qwen3_next", {"decode.tp": 2}, id="gated delta net, tp2")
PP2 = pytest.param("granite_hybrid", {"decode.pp": 2}, id="Mamba-2, pp2")
EP2 = pytest.param("granite_hybrid", {"decode.ep": 2}, id="Mamba-2, ep2")
DP2 = pytest.param("qwen3_next", {"decode.dp": 2}, id="gated delta net, dp2")
TP2_PP2 = pytest.param("qwen3_next", {"decode.tp": 2, "decode.pp": 2}, id="gated delta net, tp2 x pp2")
HANDED_OVER = pytest.param(
    "granite_hybrid", {"prefill_instances": 1, "prefill.tp": 2, "decode.pp": 2}, id="Mamba-2, tp2 to pp2"
)


class Hybrid:
    """A checkpoint in `folder`, and prompts behind which a state leaves the pool. They have no block in common."""

    def __init__(self, folder: Path, family: str) -> None:
        config = awkward(family)
        config.max_position_embeddings = 512
        self._reference = make(folder, config, seed=1)
        self.folder = folder
        self.state_blocks = read_spec(folder).kv_layout(BLOCK, "float32").state_blocks
        self.prompt_tokens = BLOCK * (blocks_apart(self.state_blocks) + 3)
        rng = random.Random(family)
        self.prompts = [
            tuple(rng.randrange(2, VOCAB) for _ in range(self.prompt_tokens)) for _ in range(NUM_PROMPTS)
        ]

    def check(self, said: list[list[int]], count: int) -> None:
        """Raise AssertionError where the answers are not those of transformers."""
        for prompt, own in zip(self.prompts, said, strict=True):
            assert own == continuation(self._reference, prompt, own, count, barred=[1])

    @property
    def room_for_two(self) -> int:
        """The blocks of two prompts with short answers."""
        return 2 * (self.state_blocks + num_blocks_for(self.prompt_tokens + SHORT, BLOCK))


async def say(
    cluster: LocalCluster, prompt: tuple[int, ...], count: int, begun: asyncio.Semaphore | None = None
) -> list[int]:
    """`begun` is released when half of it is said: the other half is longer than what a test then does, also on a busy machine."""
    sampling = SamplingParams(temperature=0.0, max_tokens=count, min_tokens=count, masked_until_min=(1,))
    frontend, tokens = cluster.frontend, list[int]()
    async for token in frontend.generate(
        Request(id=frontend.new_request_id(), prompt=prompt, sampling=sampling, reply_to=frontend.address)
    ):
        tokens.append(token.token)
        if begun and len(tokens) == count // 2:
            begun.release()
    return tokens


async def one_by_one(cluster: LocalCluster, hybrid: Hybrid) -> list[list[int]]:
    return [await say(cluster, prompt, SHORT) for prompt in hybrid.prompts]


async def begin(cluster: LocalCluster, hybrid: Hybrid) -> tuple[int, list[asyncio.Task[list[int]]]]:
    """Begin long answers, and return (which of the two decode instances says some, the answers)."""
    begun = asyncio.Semaphore(0)
    running = [asyncio.create_task(say(cluster, prompt, LONG, begun)) for prompt in hybrid.prompts]
    for _ in running:
        await begun.acquire()
    return next(at for at in (0, 1) if cluster.instances[at].num_jobs), running


async def reports(
    cluster: LocalCluster, instance: Instance, done: Callable[[InstanceStatus], bool]
) -> InstanceStatus:
    """Wait until what the instance reports is so."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = (await cluster.frontend.status()).instances
            if done(status := next(one for one in found if one.address == instance.address)):
                return status
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("family", "mesh"), [TP2, PP2, EP2, DP2, TP2_PP2])
async def test_states_come_back_from_host_memory(family: str, mesh: dict[str, int], tmp_path: Path) -> None:
    hybrid = Hybrid(tmp_path, family)
    num_blocks = mesh.get("decode.dp", 1) * hybrid.room_for_two
    keys = {**mesh, **HOST, "prefill_instances": 0, "engine.num_blocks": num_blocks}
    async with LocalCluster.running(settings(hybrid.folder, **keys)) as cluster:
        for _ in range(2):
            hybrid.check(await one_by_one(cluster, hybrid), SHORT)
        (instance,) = cluster.instances
        await reports(cluster, instance, lambda one: one.tiers.host_hits >= hybrid.state_blocks)
        instance.check_integrity()


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "a rank's part damaged"])
@pytest.mark.parametrize(("family", "mesh"), [TP2, PP2])
async def test_states_come_back_from_disk_behind_a_restart_in_all_ranks_or_in_none(
    family: str, mesh: dict[str, int], damaged: bool, tmp_path: Path
) -> None:
    hybrid, below = Hybrid(tmp_path / "model", family), tmp_path / "below"
    keys: dict[str, Any] = {**mesh, "prefill_instances": 0, **STATES}
    keys |= {"engine.disk_cache_bytes": 1 << 28, "engine.disk_cache_path": str(below)}
    async with LocalCluster.running(settings(hybrid.folder, **keys)) as cluster:
        hybrid.check(await one_by_one(cluster, hybrid), SHORT)
    if damaged:
        assert damage_states(below / "kv-0", hybrid) == NUM_PROMPTS
    async with LocalCluster.running(settings(hybrid.folder, **keys)) as cluster:
        hybrid.check(await one_by_one(cluster, hybrid), SHORT)
        (instance,) = cluster.instances
        all_tokens = NUM_PROMPTS * (hybrid.prompt_tokens + SHORT - 1)
        known = NUM_PROMPTS * (hybrid.prompt_tokens - BLOCK)

        def is_over(status: InstanceStatus) -> bool:
            return status.work.computed_tokens + status.work.prefix_hit_tokens >= all_tokens

        status = await reports(cluster, instance, is_over)
        assert status.work.prefix_hit_tokens == (0 if damaged else known)
        assert status.tiers.disk_hits >= (0 if damaged else NUM_PROMPTS * hybrid.state_blocks)
        instance.check_integrity()


_PAGE, _HEADER = 4096, struct.Struct("<8s16s16sII")
"""A slot of a file begins with a page, on which are: a mark, the root of all names, the name of the block, its bytes, a checksum."""


def damage_states(path: Path, hybrid: Hybrid) -> int:
    """Damage what the last rank has of a block of each prompt's state. Returns how many there are."""
    raw = bytearray(path.read_bytes())
    pages = range(0, len(raw), _PAGE)
    slots = [page for page in pages if raw[page : page + 8] == b"BATONKV1"]
    _, root, _, size, _ = _HEADER.unpack_from(raw, slots[0])
    wanted = {digest for prompt in hybrid.prompts for digest in second_blocks(root, prompt)}
    found = [slot for slot in slots if _HEADER.unpack_from(raw, slot)[2] in wanted]
    for slot in found:
        raw[slot + _PAGE + size - 1] ^= 1
    path.write_bytes(raw)
    return len(found)


def second_blocks(root: bytes, prompt: tuple[int, ...]) -> Iterator[bytes]:
    """Yield the names of the second block of states behind each of the prompt's blocks."""
    for digest in prefix_digests(root_digest(root, ""), prompt, BLOCK):
        yield [*state_digests(digest, 2)][1]


@pytest.mark.parametrize(("family", "mesh"), [TP2, PP2, EP2, DP2, HANDED_OVER])
async def test_a_buddy_goes_on_from_the_states_of_one_of_which_a_rank_was_killed(
    family: str, mesh: dict[str, int], tmp_path: Path
) -> None:
    hybrid = Hybrid(tmp_path, family)
    replicated = {"prefill_instances": 0, "decode_instances": 2, "transfer.kv_replicas": 1}
    keys = {**HOST, **STATES, **replicated, **mesh}
    async with LocalCluster.running(settings(hybrid.folder, **keys)) as cluster:
        at, running = await begin(cluster, hybrid)
        lost, buddy = cluster.instances[at], cluster.instances[1 - at]
        ranks()[at * len(ranks_of(mesh, "decode")) + 1].send_signal(signal.SIGKILL)
        hybrid.check(await asyncio.gather(*running), LONG)
        assert lost.failure is not None
        await reports(cluster, buddy, lambda one: one.tiers.host_hits >= hybrid.state_blocks)
        buddy.check_integrity()


@pytest.mark.parametrize(("family", "mesh"), [TP2, PP2, EP2, DP2])
async def test_sequences_leave_a_draining_instance_with_their_states(
    family: str, mesh: dict[str, int], tmp_path: Path
) -> None:
    hybrid = Hybrid(tmp_path, family)
    keys = {**STATES, **mesh, "prefill_instances": 0, "decode_instances": 2}
    async with LocalCluster.running(settings(hybrid.folder, **keys)) as cluster:
        at, running = await begin(cluster, hybrid)
        leaving, staying = cluster.instances[at], cluster.instances[1 - at]
        await leaving.drain(30)
        hybrid.check(await asyncio.gather(*running), LONG)
        await reports(cluster, staying, lambda one: one.work.prefix_hit_tokens >= hybrid.prompt_tokens)
        staying.check_integrity()
