"""Tries a backend on a step like those that it would serve: whether it is right, and how long it takes."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.attention.case import Attend, Case, StepKind
from kernels.ops import AttentionMeta
from kernels.torch.paged_attention import PagedAttention

Lens = Sequence[tuple[int, int]]
"""Each sequence's number of query tokens, and its context, which includes these."""
Timer = Callable[[Callable[[], object]], float]
"""Seconds of one call."""
LENS: Mapping[StepKind, Lens] = {
    "decode": [(1, 2048 - 7 * i) for i in range(32)],
    "prefill": [(1500, 1500), (500, 3001), *((1, 1024 + 5 * i) for i in range(8))],
}
_ROUNDS = 7
_CALLS = 10
_TOLERANCE = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Allowed differences between averages of standard normal values and the reference in the same dtype."""


@dataclass(frozen=True, slots=True)
class TrialStep:
    q: Tensor
    kv_layer: Tensor
    meta: AttentionMeta
    sinks: Tensor | None


def make_step(case: Case, lens: Lens, device: torch.device) -> TrialStep:
    """Return a random step. Places of the pool that no sequence has written are NaN, which a right result cannot contain: those
    behind the contexts' ends, and a block that each has reserved beyond."""
    random = torch.Generator(device).manual_seed(0)
    counts = [-(-context // case.block_size) for _, context in lens]
    order = np.random.default_rng(0).permutation(sum(counts) + 1).astype(np.int64)
    tables = np.split(order[:-1], np.cumsum(counts)[:-1])
    shape = (len(order), 2, case.num_kv_heads, case.block_size, case.head_dim)
    kv_layer = torch.randn(shape, dtype=case.dtype, device=device, generator=random)
    kv_layer[int(order[-1])] = torch.nan
    for table, (_, context) in zip(tables, lens, strict=True):
        kv_layer[int(table[-1]), :, :, (context - 1) % case.block_size + 1 :] = torch.nan
    queries, contexts = [query for query, _ in lens], [context for _, context in lens]
    reserved = [np.append(table, order[-1]) for table in tables]
    meta = AttentionMeta.build(queries, contexts, reserved, np.zeros(sum(queries), np.int64), device)
    q_shape = (sum(queries), case.num_heads, case.head_dim)
    q = torch.randn(q_shape, dtype=case.dtype, device=device, generator=random)
    sinks = torch.randn(case.num_heads, device=device, generator=random) if case.sinks else None
    return TrialStep(q, kv_layer, meta, sinks)


def run(attend: Attend, step: TrialStep, case: Case) -> Tensor:
    return attend(step.q, step.kv_layer, step.meta, case.scale, case.window, case.soft_cap, step.sinks)


def reference(step: TrialStep, case: Case) -> Tensor:
    return run(PagedAttention(), step, case)


def fault(attend: Attend, step: TrialStep, case: Case, expected: Tensor) -> str:
    """Return why the backend is not to be used; empty where it may be. Other people's code may raise anything."""
    try:
        got = run(attend, step, case)
        tolerance = _TOLERANCE[case.dtype]
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    except AssertionError:
        return "its result is not the reference's"
    except Exception as error:  # whatever it is, this backend does not work here
        return f"it failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ""


def timings(
    attends: Mapping[str, Attend], step: TrialStep, case: Case, timer: Timer
) -> dict[str, list[float]]:
    """Return the seconds of a call in each round. Rounds are interleaved, so that a disturbance of the machine hits all of them.
    What a backend prepares once a step is left out, since a step has many layers."""
    times: dict[str, list[float]] = {name: [] for name in attends}
    for _ in range(_ROUNDS):
        for name, attend in attends.items():
            times[name].append(timer(lambda attend=attend: run(attend, step, case)))
    return times


def device_timer(device: torch.device) -> Timer:
    """Return a timer of calls on `device` behind each other. It is the launches' time where they take longer than what they
    launch."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # before any step: what is launched is what is timed

    def timer(call: Callable[[], object]) -> float:
        wait()
        started = time.perf_counter()
        for _ in range(_CALLS):
            call()
        wait()
        return (time.perf_counter() - started) / _CALLS

    return timer
