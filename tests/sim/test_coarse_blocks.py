"""The coarse simulation's blocks are given up in the production order, however large they are."""

import itertools

import pytest

from core.kv import block_hashes
from core.types import Request, SamplingParams
from engine.planning.sequence import Sequence
from sim.coarse.blocks import Blocks
from sim.coarse.simulated_sequence import SimulatedRequest, SimulatedSequence


@pytest.mark.parametrize("block_tokens", [64, 512])
def test_conversations_survive_a_stream_of_prompts_that_nobody_will_go_on_from(block_tokens: int) -> None:
    """By least recent use alone none is found again: between two uses of one the pool is filled anew."""
    blocks, fresh = Blocks(400, block_tokens, itertools.count(1).__next__), itertools.count(1_000_000)
    talks = [tuple(range(i * 1000, i * 1000 + 8)) for i in range(1, 17)]
    hits = 0
    for _ in range(60):
        for number in range(24):
            _serve(blocks, tuple(itertools.islice(fresh, 16)), block_tokens, retain=False)
            if number < len(talks):
                hits += _serve(blocks, talks[number], block_tokens)
    assert hits > 0.9 * 59 * 16 * 7
    blocks.check_integrity()


def _serve(blocks: Blocks, ids: tuple[int, ...], block_tokens: int, *, retain: bool = True) -> int:
    """How many of its blocks were cached."""
    num_prompt = len(ids) * block_tokens
    sampling = SamplingParams(max_tokens=1)
    request = Request(id=f"r{ids[0]}", prompt=(), sampling=sampling, reply_to="", retain=retain)
    job = SimulatedRequest(request=request, ids=ids, hashes=block_hashes(ids, 1), num_prompt=num_prompt)
    seq = SimulatedSequence(
        job=job,
        address="here",
        arrival=ids[0],
        num_known=num_prompt,
        ready_at=0.0,
        blocks=Sequence(request=request, tokens=list(ids), num_prompt=len(ids), arrival=0),
    )
    assert blocks.admit(seq, num_prompt, 0)
    num_cached, seq.num_computed = seq.num_computed // block_tokens, num_prompt
    blocks.offer(seq)
    blocks.strip(seq)
    return num_cached
