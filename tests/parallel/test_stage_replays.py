"""What a pipeline's stage does with captured steps, with graphs in place of which memory is merely written over."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from core.plan import KVPush, NewSeq, SeqWork, StepPlan
from core.ports import LayerDone
from core.types import SamplingParams
from engine.execution.sampling.step_sampling import StepSampler
from engine.ranks.pipeline_stage import StageRunner

HIDDEN = 3


class Next:
    """The stage behind: it keeps what was sent to it, and what that was when it was sent."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.sent: list[tuple[torch.Tensor, torch.Tensor]] = []

    def send(self, x: torch.Tensor, to: int) -> None:
        self.sent.append((x, x.clone()))

    def recv(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)


class Graphs:
    """All replays end in the same memory."""

    def __init__(self, *, with_prompts: bool = False) -> None:
        self._with_prompts = with_prompts
        self.num_replays = self.num_launches = 0
        self.received: list[int | None] = []
        self._memory = torch.zeros(8, HIDDEN)

    def padded(self, *groups: Sequence[SeqWork]) -> int:
        if not self._with_prompts and any(item.count > 1 for work in groups for item in work):
            return 0
        return max(sum(item.count for item in work) for work in groups)

    def pack(self, size: int, work: Sequence[SeqWork], seqs: object, pack: object) -> Any:
        count = sum(item.count for item in work)
        assert size >= count
        return SimpleNamespace(
            num_rows=count,
            hidden=lambda inputs, states, layer_done, first: self._hidden(count, states, layer_done, first),
            sampled=lambda hidden: hidden,
        )

    def launched(self, x: torch.Tensor, *_: object) -> torch.Tensor:
        self.num_launches += 1
        return torch.zeros(len(x), HIDDEN)

    def _hidden(
        self, count: int, states: torch.Tensor | None, layer_done: LayerDone | None, first_layer: int
    ) -> torch.Tensor:
        if layer_done is not None:
            layer_done(0, first_layer)
        self.num_replays += 1
        self.received.append(None if states is None else len(states))
        return self._memory.fill_(self.num_replays)[:count]


def stage(
    sink: Any = None, *, is_first: bool = True, with_prompts: bool = False, first_layer: int = 0
) -> tuple[StageRunner, Graphs, Next]:
    """One that has another behind it."""
    graphs, behind = Graphs(with_prompts=with_prompts), Next()
    model = Mock(is_first=is_first, is_last=False, dtype=torch.float32)
    model.spec.hidden_size = HIDDEN
    model.forward.side_effect = graphs.launched
    shard: Any = SimpleNamespace(
        layout=SimpleNamespace(block_size=4, state_blocks=0), layers=(first_layer, first_layer + 2)
    )
    pool = Mock(device=torch.device("cpu"), is_told=False)
    comm: Any = behind
    sampler = Mock(spec=StepSampler)
    sampler.take_dead_ends.return_value = ()
    runner = StageRunner(model, pool, shard, comm, 2, sink, sampler=sampler, graphs=graphs)  # type: ignore[arg-type]
    return runner, graphs, behind


def plan(*counts: int, push: KVPush | None = None) -> StepPlan:
    """Return a plan for sequences with so many tokens to be computed, none of which samples."""
    sampling = SamplingParams(max_tokens=4)
    new = [NewSeq(str(i), (7,) * count, count, sampling) for i, count in enumerate(counts)]
    work = [
        SeqWork(key=str(i), start=0, count=count, block_ids=(i, i + 9), samples=False, push=push)
        for i, count in enumerate(counts)
    ]
    return StepPlan(step=0, new=tuple(new), copies=(), work=tuple(work), drop=())


def test_what_is_on_its_way_to_the_next_stage_does_not_change_when_the_next_part_is_replayed() -> None:
    runner, graphs, behind = stage()
    assert runner.step(plan(1, 1, 1, 1)).replayed
    assert graphs.num_replays == len(behind.sent) == 2
    assert all(torch.equal(now, then) for now, then in behind.sent)


@pytest.mark.parametrize(("counts", "replays"), [((3, 1, 1, 1), 1), ((4, 4), 0)])
def test_parts_with_prompts_are_launched(counts: tuple[int, ...], replays: int) -> None:
    runner, graphs, behind = stage()
    assert not runner.step(plan(*counts)).replayed
    assert (graphs.num_replays, len(behind.sent)) == (replays, 2)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_replayed_part_has_a_row_for_each_token_from_the_stage_before_and_for_the_next(
    is_first: bool,
) -> None:
    runner, graphs, behind = stage(is_first=is_first, with_prompts=True)
    assert runner.step(plan(3, 1, 2)).replayed
    assert graphs.received == ([None] * 2 if is_first else [3, 3])
    assert [len(then) for _, then in behind.sent] == [3, 3]


def test_layers_are_there_when_the_last_part_is_replayed() -> None:
    sink, told = Mock(), list[tuple[int, int]]()
    runner, graphs, _ = stage(sink, first_layer=3)
    sink.step_started.return_value = lambda rank, layer: told.append((graphs.num_replays, layer))
    assert runner.step(plan(1, 1, 1, 1)).replayed
    assert told == [(1, 3)]


def test_a_group_replays_a_part_where_all_do_also_without_work_of_its_own() -> None:
    """Another group's two parts are decode alone, or have a prompt in one of them."""
    decoding, prompt = plan(1, 1, 1, 1).work, plan(3, 1, 1, 1).work
    for own in ((), decoding[:1], decoding):
        for other, num_launches in ((decoding, 0), (prompt, 1)):
            runner, graphs, _ = stage()
            result = runner.step(replace(plan(1, 1, 1, 1), work=own, groups=(own, other)))
            assert (graphs.num_replays, graphs.num_launches) == (2 - num_launches, num_launches)
            assert result.replayed == (not num_launches)
