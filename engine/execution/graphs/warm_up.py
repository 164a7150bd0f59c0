"""Steps that a rank computes before it serves, so that no request waits while kernels are compiled, loaded or chosen.

On a GPU the first prompt of a size may take seconds for that. An instance that served meanwhile would learn from such steps that
prompts take seconds, and give them next to nothing of each step."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from core.errors import ConfigError, OutOfMemory
from core.kv import num_blocks_for
from core.plan import NewSeq, SeqWork, StepPlan, StepResult
from core.types import SamplingParams

_log = logging.getLogger(__name__)

Step = Callable[[StepPlan], StepResult]

_SIZES: Final = (4096, 1024, 256, 64)
"""Tokens of prompts that are alone. Between them kernels are the same ones."""
_SHORT: Final = 16
"""Tokens of prompts of which there are many at once."""
_SAMPLINGS: Final = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, num_logprobs=1),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, presence_penalty=0.5),
)
"""What prompts ask for, from step to step: the likeliest of logits as they are, the likeliest of floats with log-probabilities,
and samples behind penalties."""


def warm_up(
    step: Step,
    *,
    max_tokens: int,
    max_seqs: int,
    max_context_tokens: int,
    num_blocks: int,
    block_size: int,
    num_state_blocks: int = 0,
    num_groups: int = 1,
) -> None:
    """Execute prompts of several sizes, each beside the tokens behind the last ones'.

    The first step has as many of the longest as it may have tokens, the last but one a prompt for each of `max_seqs` sequences:
    what is split among a GPU's processors where there is little of it is not split there, which other kernels do. They write to
    the pool's first blocks, which nobody has yet. All ranks that meet in a step must call this at the same point with the same
    numbers, with a `meeting` step. `num_groups`: the groups of ranks that meet at the experts, which have the same work each. A
    step for which there is no memory is said, and left out."""
    room = (num_blocks - num_state_blocks - 1) * block_size
    most = min(max_tokens, max_context_tokens - 2, room - 1)
    started = time.perf_counter()
    known: list[tuple[str, int]] = []
    drop: tuple[str, ...] = ()
    shapes = _shapes(most, max_tokens, max_seqs)
    _log.info("%d first steps are computed, so that no request waits while kernels are compiled", len(shapes))
    for number, (num_prompts, size) in enumerate(shapes):
        keys = [f"warm-up {number}.{prompt}" for prompt in range(num_prompts)]
        beside = min(max_seqs - num_prompts, max_tokens - num_prompts * size)
        pieces = [*((key, 0, size) for key in keys), *((key, start, 1) for key, start in known[:beside])]
        work = tuple(_work(*piece, num_state_blocks, block_size) for piece in pieces)
        sampling = _SAMPLINGS[number % len(_SAMPLINGS)]
        plan = StepPlan(
            step=number - len(shapes),
            new=tuple(NewSeq(key, (0,) * size, size, sampling) for key in keys),
            copies=(),
            work=work,
            drop=drop,
            groups=(work,) * num_groups if num_groups > 1 else (),
        )
        drop, began = tuple(key for key, _ in known), time.perf_counter()
        try:
            step(plan)
        except OutOfMemory as error:
            _log.warning("%s: no memory for it: %s", _said(number, shapes), error)
            drop, known = (*drop, *keys), []
        else:
            known = [(key, size) for key in keys]
            _log.info("%s: %.1f s", _said(number, shapes), time.perf_counter() - began)
    _log.info("first steps took %.1f s", time.perf_counter() - started)


def meeting(step: Step) -> Step:
    """Return the step of a rank that meets others in it. Where one finds no memory the others wait for it, so that the start ends
    with a ConfigError."""

    def tried(plan: StepPlan) -> StepResult:
        try:
            return step(plan)
        except OutOfMemory as error:
            raise ConfigError(
                f"no memory for a first step of {plan.num_tokens} tokens ({error}): lower engine.max_batch_tokens, or "
                "engine.memory_utilization for a smaller KV pool"
            ) from error

    return tried


def _said(number: int, shapes: Sequence[tuple[int, int]]) -> str:
    num_prompts, size = shapes[number]
    prompts = "a prompt" if num_prompts == 1 else f"{num_prompts} prompts"
    return f"first step {number + 1} of {len(shapes)}, {prompts} of {size} tokens"


def _shapes(most: int, max_tokens: int, max_seqs: int) -> list[tuple[int, int]]:
    """Return (prompts, tokens of each) of each step."""
    shapes = [(min(max_seqs, max_tokens // most), most), *((1, size) for size in _SIZES if size < most)]
    if most > _SHORT:
        many = min(max_seqs - 1, (max_tokens - 1) // _SHORT)
        shapes += [(many, _SHORT)] * (many > 1) + [(1, _SHORT)]
    return shapes


def _work(key: str, start: int, count: int, num_state_blocks: int, block_size: int) -> SeqWork:
    num_blocks = num_state_blocks + num_blocks_for(start + count, block_size)
    return SeqWork(key=key, start=start, count=count, block_ids=tuple(range(num_blocks)), samples=True)
