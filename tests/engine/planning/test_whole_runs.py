"""Runs of tokens that see each other are never cut, and what a cache has of them was computed with all of them in sight."""

import random
from collections.abc import Sequence as Seq
from typing import NamedTuple

import pytest

from core.config.cluster_config import EngineConfig
from core.cost.steps import StepModels
from core.plan import Sampled, SeqWork, StepPlan, StepResult
from core.ports import ServedSequence
from core.prompt_images import PromptImage
from core.types import Request, SamplingParams
from engine.planning.step_scheduler import StepScheduler
from engine.planning.whole_runs import missing_runs, uncut
from tests.engine.fifo_policy import FifoPolicy

PLACEHOLDER, SAMPLED, BLOCK_SIZE, ROWS = 1, 2, 4, 7


class Hesitant(FifoPolicy):
    """Gives prompts a few tokens of a step, or none, as policies do beside sequences that decode."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def prompt_tokens(
        self,
        decoding: Seq[ServedSequence],
        context_tokens: int,
        prompts: Seq[ServedSequence],
        steps: StepModels,
        budget_tokens: int,
        starts_at: float,
    ) -> int:
        return min(budget_tokens, self.rng.randrange(12)) if decoding else budget_tokens


class Rank:
    """Keeps in each slot what its token has seen, and refuses to read what should have seen something else."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[int, ...]] = {}
        self.requests: dict[str, Request] = {}
        self.num_whole = self.num_rests = 0
        """Runs that were computed, and those of which a part was there."""

    def step(self, plan: StepPlan) -> StepResult:
        for copy in plan.copies:
            for at in range(copy.num_tokens):
                self.slots[copy.dst * BLOCK_SIZE + at] = self.slots[copy.src * BLOCK_SIZE + at]
        for work in plan.work:
            self.compute(work)
        return StepResult(
            step=plan.step, sampled=tuple(Sampled(work.key, SAMPLED) for work in plan.work if work.samples)
        )

    def compute(self, work: SeqWork) -> None:
        request, end = self.requests[work.key], work.start + work.count
        names = request.tokens + (SAMPLED,) * request.sampling.max_tokens
        whole = [(first, first + count) for one in request.images for first, count in one.spans]
        self.num_whole += len(work.both_ways)
        self.num_rests += any(first < work.start < stop for first, stop in whole)

        def place(token: int) -> int:
            return work.block_ids[token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE

        for token in range(work.start, end):
            said = [first + count for first, count in work.both_ways if first <= token < first + count]
            self.slots[place(token)] = names[: min(end, said[0] if said else token + 1)]
        for token in range(end):
            seen = next((stop for first, stop in whole if first <= token < stop), token + 1)
            assert self.slots[place(token)] == names[:seen], (work.key, token)


class WithImages(NamedTuple):
    prompt: tuple[int, ...]
    images: tuple[PromptImage, ...]


def some_prompt(rng: random.Random, shared: WithImages) -> WithImages:
    """A prompt that may begin as another one does, with images of few kinds, some of several runs."""
    tokens, images = list(shared.prompt), list(shared.images)
    for _ in range(rng.randrange(3)):
        tokens += [rng.randrange(3, 5) for _ in range(rng.randint(1, 6))]
        kind, spans = rng.randrange(3), list[tuple[int, int]]()
        for _ in range(1 + kind % 2):
            spans.append((len(tokens), ROWS - kind))
            tokens += [*[PLACEHOLDER] * (ROWS - kind), 9]
        images.append(PromptImage(bytes([kind]), tuple(spans), both_ways=True))
    tokens += [rng.randrange(3, 5) for _ in range(rng.randint(1, 4))]
    return WithImages(tuple(tokens), tuple(images))


def test_every_token_has_seen_what_it_should_however_prompts_are_planned() -> None:
    """With few blocks, sequences give way to each other and are computed again; some steps find no memory."""
    ranks = [served(random.Random(seed)) for seed in range(40)]
    assert all(rank.num_whole for rank in ranks)
    assert sum(rank.num_rests for rank in ranks) > 10, "some cached prefixes end within an image"


def served(rng: random.Random) -> Rank:
    """Serve requests to their ends."""
    num_seqs = rng.randint(1, 4)
    config = EngineConfig(
        block_size=BLOCK_SIZE, max_batch_tokens=ROWS + num_seqs - 1 + rng.randrange(9), max_num_seqs=num_seqs
    )
    engine, rank = StepScheduler(config, rng.choice((40, 200)), 1000, Hesitant(rng)), Rank()
    starts = [some_prompt(rng, WithImages((), ())) for _ in range(3)]
    for number in range(20):
        prompt, images = some_prompt(rng, rng.choice(starts))
        params = SamplingParams(max_tokens=rng.randint(1, 9))
        request = Request(id=str(number), prompt=prompt, sampling=params, reply_to="f", images=images)
        rank.requests[request.key] = request
        engine.sequences.add(request)
    finished, num_failed = set[str](), 0
    for _ in range(4000):
        if (plan := engine.plan(0.0)) is None:
            break
        if num_failed < 10 and rng.random() < 0.05:
            num_failed += 1
            engine.take_back()
            continue
        out = engine.commit(plan, rank.step(plan), 0.0)
        finished |= {token.key for token in out if token.finish}
        engine.check_integrity()
    assert finished == set(rank.requests), "it never ends"
    assert engine.load().num_used_blocks == 0
    return rank


def test_what_is_left_of_a_run_is_one() -> None:
    images = (
        PromptImage(b"a", ((3, 4), (9, 2))),
        PromptImage(b"b", ((20, 5), (27, 5)), both_ways=True),
    )
    assert missing_runs(images, 0) == ((20, 5), (27, 5))
    assert missing_runs(images, 22) == ((22, 3), (27, 5))
    assert missing_runs(images, 25) == ((27, 5),)


@pytest.mark.parametrize(
    ("start", "count", "most", "wanted"),
    [
        (0, 30, 30, 30),
        (0, 20, 5, 20),
        (0, 21, 21, 20),
        (0, 25, 25, 25),
        (20, 3, 5, 5),
        (20, 3, 4, 0),
        (20, 5, 5, 5),
    ],
)
def test_a_run_is_computed_whole_or_later(start: int, count: int, most: int, wanted: int) -> None:
    assert uncut(((20, 5),), start, count, most) == wanted
