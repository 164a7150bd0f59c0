"""The engine's accounting while sequences pause and give up their blocks: as test_engine_accounting.py, with a clock that goes
on."""

import random
from dataclasses import replace
from typing import Literal

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from core.config.cluster_config import EngineConfig
from core.types import Slo
from engine.planning.sequence import Sequence
from engine.planning.step_scheduler import StepScheduler
from tests.property.below import Below
from tests.property.some_requests import some_requests
from tests.property.test_engine_accounting import Drive, Moves, check_end

PACES_S = (0.1, 3.0)


class Overcommitted(Drive):
    """Counts how often a sequence has paused."""

    num_paused = 0

    def watch(self) -> None:
        assert isinstance(self.scheduler, StepScheduler)
        preemption = self.scheduler.group.preemption
        pauses = preemption.pauses

        def count(seq: Sequence, now: float) -> None:
            self.num_paused += 1
            pauses(seq, now)

        preemption.pauses = count


def serve(
    seed: int,
    num_blocks: int = 24,
    block_size: int = 2,
    budget: int = 16,
    *,
    depth: int = 1,
    num_groups: int = 1,
    put_off: float = 0.0,
    speculate: Literal["none", "ngram"] = "none",
    no_memory: float = 0.0,
    step_s: float = 0.1,
    pause_s: float = 5.0,
) -> int:
    """Serve some requests, and return how often one has paused."""
    rng = random.Random(seed)
    config = EngineConfig(
        block_size=block_size,
        max_batch_tokens=budget,
        max_num_seqs=rng.randint(3, 8),
        speculate=speculate,
        speculate_tokens=rng.randint(1, 6),
        longest_pause_s=pause_s,
    )
    drive = Overcommitted(
        config, num_blocks, depth, rng, num_groups, put_off, no_memory=no_memory, step_s=step_s
    )
    if num_groups == 1:
        drive.watch()
    requests = [
        replace(one, slo=Slo(tpot_s=rng.choice(PACES_S), priority=rng.choice((0, 0, 1))))
        for one in some_requests(rng, num_blocks * block_size)
    ]
    moves = Moves(drive, rng, requests)
    moves.below = Below(drive.scheduler, drive.rank, rng)
    moves.run()
    check_end(moves, num_blocks * num_groups)
    return drive.num_paused


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(6, 40),
    block_size=st.sampled_from([1, 2, 4]),
    budget=st.integers(1, 24),
    depth=st.sampled_from([1, 2]),
    num_groups=st.sampled_from([1, 1, 2]),
    put_off=st.sampled_from([0.0, 0.0, 0.2, 0.7]),
    speculate=st.sampled_from(["none", "ngram"]),
    no_memory=st.sampled_from([0.0, 0.0, 0.05, 0.3]),
    step_s=st.sampled_from([0.01, 0.1, 1.0]),
    pause_s=st.sampled_from([0.0, 0.3, 5.0]),
)
@example(  # the one sequence of a step gives way, while another one runs
    seed=2_027_594_307, num_blocks=17, block_size=2, budget=3, depth=1, num_groups=1, put_off=0.0, speculate="none",
    no_memory=0.05, step_s=0.1, pause_s=0.3,
)  # fmt: skip
def test_every_sequence_gets_its_tokens_while_some_pause(
    seed: int,
    num_blocks: int,
    block_size: int,
    budget: int,
    *,
    depth: int,
    num_groups: int,
    put_off: float,
    speculate: Literal["none", "ngram"],
    no_memory: float,
    step_s: float,
    pause_s: float,
) -> None:
    serve(
        seed, num_blocks, block_size, budget, depth=depth, num_groups=num_groups, put_off=put_off, speculate=speculate,
        no_memory=no_memory, step_s=step_s, pause_s=pause_s,
    )  # fmt: skip


def test_sequences_pause_in_these() -> None:
    for depth in (1, 2):
        assert sum(serve(seed, depth=depth) for seed in range(30)) > 20
    assert not any(serve(seed, pause_s=0.0) for seed in range(30))
