"""A step for which a device has no memory is undone and computed again with less: nobody's tokens change."""

import asyncio
import logging
import random
import weakref
from collections.abc import Container
from pathlib import Path

import numpy as np
import pytest
import torch

from core.errors import OutOfMemory
from core.types import Request, SamplingParams, TokenOut
from engine.execution.freeing import freeing
from models.causal_model import CausalModel
from models.registry import load_model
from tests.engine.execution.test_launching import BOUND, FREE, agree, open_matchers, requests
from tests.engine.launching import Launching
from tests.models.checkpoints import CPU, FAMILIES, HYBRID, make


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    folder = tmp_path_factory.mktemp("model")
    make(folder, FAMILIES["llama"](random.Random(3), 0), seed=3)
    return load_model(folder, "float32", CPU)


@pytest.fixture(scope="module")
def undisturbed(model: CausalModel) -> dict[str, list[TokenOut]]:
    """What an instance says that waits for each step, in host memory."""
    instance = Launching(model, matchers=open_matchers(), launching=False)
    return asyncio.run(instance.run(requests(FREE, BOUND)))


def without(chosen: Container[int], instance: Launching) -> Launching:
    """The instance, whose device has no memory for the allocations of these numbers."""
    instance.device.run_out(chosen)
    return instance


@pytest.mark.turns(3)
@pytest.mark.parametrize("first", range(0, 24, 3))
async def test_a_step_may_run_out_of_memory_wherever_it_allocates(
    first: int, model: CausalModel, undisturbed: dict[str, list[TokenOut]]
) -> None:
    instance = without(range(first, 10_000, 23), Launching(model, matchers=open_matchers()))
    agree(await instance.run(requests(FREE, BOUND)), undisturbed)
    assert instance.work.out_of_memory_steps > 3


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("num_blocks", "config"),
    [(17, {"max_batch_tokens": 7}), (200, {"speculate": "ngram"}), (200, {"prefix_cache": False})],
    ids=["chunks and preemption", "drafts", "no prefix cache"],
)
async def test_however_steps_are_made_up(
    num_blocks: int,
    config: dict[str, object],
    model: CausalModel,
    undisturbed: dict[str, list[TokenOut]],
) -> None:
    instance = without(range(4, 10_000, 29), Launching(model, num_blocks, matchers=open_matchers(), **config))
    agree(await instance.run(requests(FREE, BOUND)), undisturbed)
    assert instance.work.out_of_memory_steps > 3


async def test_what_is_wanted_of_each_token_of_a_prompt_is_computed_from_the_beginning(
    model: CausalModel,
) -> None:
    asked = requests({"scored": FREE["scored"], "mean": SamplingParams(pooling="mean", max_tokens=1)})
    want = await Launching(model, launching=False).run(asked)
    instance = without((8, 27, 46, 71), Launching(model, max_batch_tokens=5))
    got = await instance.run(asked)
    agree(got, want)
    vectors = [np.frombuffer(said["mean"][0].embedding, "<f4") for said in (got, want)]
    assert np.allclose(*vectors, atol=1e-5)
    assert instance.num_preempted


async def test_results_may_find_none_when_the_next_step_has_been_launched(
    model: CausalModel, undisturbed: dict[str, list[TokenOut]]
) -> None:
    instance = Launching(model, matchers=open_matchers())
    assert instance.watched is not None
    instance.watched.unread = range(3, 10_000, 5)
    agree(await instance.run(requests(FREE, BOUND)), undisturbed)
    assert instance.work.out_of_memory_steps > 3


@pytest.mark.turns(3)
@pytest.mark.parametrize("speculate", ["none", "ngram"])
async def test_recurrent_states_are_computed_from_the_beginning(speculate: str, tmp_path: Path) -> None:
    make(tmp_path, HYBRID["qwen3_next"](random.Random(4), 0), seed=2)
    hybrid, asked = load_model(tmp_path, "float32", CPU), requests(FREE)[:3]
    want = await Launching(hybrid, 1000, launching=False).run(asked)
    instance = without((9, 60, 200), Launching(hybrid, 250, speculate=speculate))
    agree(await instance.run(asked), want)
    assert instance.work.out_of_memory_steps == 3
    assert instance.num_preempted


async def test_steps_are_as_large_as_there_is_memory_for_and_the_log_says_for_whom_there_was_none(
    model: CausalModel, undisturbed: dict[str, list[TokenOut]], caplog: pytest.LogCaptureFixture
) -> None:
    instance = Launching(model, matchers=open_matchers())
    assert instance.watched is not None
    instance.watched.most_tokens = 14
    with caplog.at_level(logging.WARNING):
        agree(await instance.run(requests(FREE, BOUND)), undisturbed)
    assert instance.work.out_of_memory_steps > 3
    assert "greedy#0" in caplog.text
    assert "tokens are too many" in caplog.text


async def test_the_engine_ends_where_there_is_no_memory_for_one_token(model: CausalModel) -> None:
    instance = Launching(model)
    assert instance.watched is not None
    instance.watched.most_tokens = 0
    with pytest.raises(OutOfMemory, match="1 tokens are too many"):
        await instance.run([Request(id="a", prompt=(5,), sampling=SamplingParams(), reply_to="f")])


def test_the_tensors_of_a_step_are_gone_when_the_allocator_gives_back_what_it_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    left: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.append(made[0]() is not None))

    def step(plan: int) -> None:
        activations = torch.zeros(plan)
        made.append(weakref.ref(activations))
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with pytest.raises(OutOfMemory, match=r"Tried to allocate 2\.00 GiB"):
        freeing(step, 8)
    assert left == [False]
