"""Steps that a rank computes before it serves, so that no request waits while kernels are compiled, loaded or chosen.

On a GPU the first prompt of a size may take seconds for that. An instance that served meanwhile would learn from such steps that
prompts take seconds, and give them next to nothing of each step."""

import logging
import time
from collections.abc import Callable
from typing import Final

from core.errors import OutOfMemory
from core.kv import num_blocks_for
from core.plan import NewSeq, SeqWork, StepPlan, StepResult
from core.types import SamplingParams

_log = logging.getLogger(__name__)

_SIZES: Final = (4096, 1024, 256, 64, 16)
"""Tokens of the prompts. Between them kernels are the same ones."""
_DRAWS: Final = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, num_logprobs=1),
)


def warm_up(
    step: Callable[[StepPlan], StepResult],
    *,
    max_tokens: int,
    max_context_tokens: int,
    num_blocks: int,
    block_size: int,
    num_state_blocks: int = 0,
    num_groups: int = 1,
) -> None:
    """Execute prompts of several sizes, the first with `max_tokens`, each beside the token behind the last one's.

    They write to the pool's first blocks, which nobody has yet. All ranks that meet in a step must call this at the same point
    with the same numbers. `num_groups`: the groups of ranks that meet at the experts, which have the same work each. A step for
    which there is no memory is said, and left out."""
    room = (num_blocks - num_state_blocks - 1) * block_size
    most = min(max_tokens, max_context_tokens - 2, room - 1)
    started = time.perf_counter()
    known: tuple[str, int] | None = None
    drop: tuple[str, ...] = ()
    for number, size in enumerate((most, *(size for size in _SIZES if size < most))):
        key = f"warm-up {number}"
        pieces = [(key, 0, size), *([(*known, 1)] if known else ())]
        work = tuple(_work(*piece, num_state_blocks, block_size) for piece in pieces)
        plan = StepPlan(
            step=number - len(_SIZES) - 1,
            new=(NewSeq(key, (0,) * size, size, _DRAWS[number % len(_DRAWS)]),),
            copies=(),
            work=work,
            drop=drop,
            groups=(work,) * num_groups if num_groups > 1 else (),
        )
        drop = (known[0],) if known else ()
        try:
            step(plan)
        except OutOfMemory as error:
            _log.warning("no memory for a first step of %d tokens: %s", plan.num_tokens, error)
            drop, known = (*drop, key), None
        else:
            known = key, size
    _log.info("steps of up to %d tokens were tried in %.1f s", most, time.perf_counter() - started)


def _work(key: str, start: int, count: int, num_state_blocks: int, block_size: int) -> SeqWork:
    num_blocks = num_state_blocks + num_blocks_for(start + count, block_size)
    return SeqWork(key=key, start=start, count=count, block_ids=tuple(range(num_blocks)), samples=True)
