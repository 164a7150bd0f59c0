"""What is known of a head's blocks, against a list of what every slot was made of."""

import random

import numpy as np
import pytest

from core.plan import BlockCopy, NewSeq
from core.types import SamplingParams
from engine.execution.batch.batch import RankSeq
from engine.execution.drafting.head_kv import HeadBlocks, HeadSeq

SIZE, NUM_BLOCKS, LENGTH = 4, 6, 20


@pytest.mark.parametrize("seed", range(20))
def test_a_sequence_finds_what_was_made_of_its_own_tokens_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    blocks = HeadBlocks(SIZE)
    made: dict[int, tuple[int, ...]] = {}
    """For each slot the tokens up to its own."""
    texts = [tuple(rng.randrange(2) for _ in range(LENGTH)) for _ in range(3)]
    tables = [rng.sample(range(NUM_BLOCKS), LENGTH // SIZE) for _ in range(3)]
    for _ in range(60):
        cut = rng.randint(0, LENGTH)
        tokens, table = rng.choice(texts)[:cut] + rng.choice(texts)[cut:], rng.choice(tables)
        slots = [table[at // SIZE] * SIZE + at % SIZE for at in range(LENGTH)]
        if rng.random() < 0.3:
            copy = BlockCopy(*rng.sample(range(NUM_BLOCKS), 2), rng.randint(1, SIZE))
            blocks.copied([copy])
            for at in range(SIZE):
                kept = made.get(copy.src * SIZE + at, ())
                made[copy.dst * SIZE + at] = kept if at < copy.num_tokens else ()
        here = [made.get(slot, ()) == tokens[: at + 1] for at, slot in enumerate(slots)]
        count = here.index(False) if False in here else LENGTH
        assert blocks.num_held(tokens, table) == count
        seq = HeadSeq(RankSeq(NewSeq("k", tokens, LENGTH, SamplingParams(max_tokens=4))), blocks)
        start = rng.randint(0, LENGTH - 1)
        first = seq.start(start, table)
        assert (first == start) == (count >= start or start % SIZE == 0)
        assert seq.first_block == (0 if count >= start else -(-start // SIZE))
        end = rng.randint(min(first, LENGTH - 1), LENGTH - 1)
        if end > first:
            seq.computed(first, end, table)
            known = seq.first_block == 0
            touched = np.arange(first // SIZE * SIZE, end)
            made |= {slots[at]: tokens[: at + 1] if known else () for at in touched}
            for at in range(end, -(-end // SIZE) * SIZE):
                made[slots[at]] = ()  # the head looks no further than what it was told of
        seq.drafted(end, table)
        for at in range(end, (end // SIZE + 1) * SIZE):
            made[slots[at]] = ()
