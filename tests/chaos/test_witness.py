"""The witness itself: a run over an untouched pool equals the reference, and one flipped bit does not."""

import mmap

from core.plan import NewSeq, SeqWork, StepPlan
from core.types import SamplingParams
from tests.chaos.witness import SHARD, WitnessRank, undisturbed

PROMPT = tuple(range(7, 20))


def run(flip: int | None = None) -> tuple[int, ...]:
    buffer = memoryview(mmap.mmap(-1, SHARD.pool_bytes(16)))
    rank = WitnessRank(buffer, 16, None, 0.0)
    blocks = (3, 9, 1, 14, 2, 5)
    new = NewSeq("r#0", PROMPT, len(PROMPT), SamplingParams(max_tokens=8))
    rank.step(
        StepPlan(
            step=0,
            new=(new,),
            copies=(),
            work=(SeqWork(key="r#0", start=0, count=8, block_ids=blocks[:2], samples=False),),
            drop=(),
        )
    )
    tokens = []
    if flip is not None:
        buffer[flip] ^= 1
    start, count = 8, len(PROMPT) - 8
    for step in range(1, 9):
        work = SeqWork(
            key="r#0", start=start, count=count, block_ids=blocks[: -(-(start + count) // 4)], samples=True
        )
        tokens.append(
            rank.step(StepPlan(step=step, new=(), copies=(), work=(work,), drop=())).sampled[0].token
        )
        start, count = start + count, 1
    return tuple(tokens)


def test_an_untouched_run_equals_the_reference() -> None:
    assert run() == undisturbed(PROMPT, 8)


def test_every_flipped_bit_in_a_used_block_shows() -> None:
    layer_bytes = 16 * SHARD.block_bytes
    for layer in range(3):
        for at in (0, 31, SHARD.block_bytes - 1):
            assert run(layer * layer_bytes + 3 * SHARD.block_bytes + at)[0] != undisturbed(PROMPT, 1)[0]
