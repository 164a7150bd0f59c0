"""Runs a beam search over instances: each beam's next token is a request of one token, which finds its KV in a prefix cache.

Invariant: a beam is a function of the request and of what instances said of its tokens. Nothing is kept anywhere for it but
cached blocks, so an instance that is lost costs only their computation."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from cluster.ingress.delivery.beam_search import Beam, BeamParams, BeamSearch, Likeliest
from cluster.ingress.delivery.shared_prompt import SharedPrompt
from core.types import CacheHints, FinishReason, Request, SamplingParams, TokenOut

T = TypeVar("T")
Sample = Callable[[Request, SharedPrompt], Awaitable[TokenOut]]
"""Samples one token of a request, wherever the KV of its beginning is."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a beam search has found."""

    beams: tuple[tuple[TokenOut, ...], ...]
    """The best, best first; a token that ends one is part of it."""
    num_sampled: int
    """Tokens that were computed for it."""


async def search(
    request: Request, params: BeamParams, count: int, sample: Sample, new_request_id: Callable[[], str]
) -> Found:
    """Find the `count` best continuations of `request`'s prompt. Its `sampling` says how long they may be, which tokens end them,
    and how many log-probabilities are wanted. Nothing is sampled."""
    sampling, shared = request.sampling, SharedPrompt()
    beams = BeamSearch(params, frozenset(sampling.stop_token_ids), sampling.max_tokens)
    num_sampled = 0

    async def following(beam: Beam) -> Likeliest:
        step = replace(_step(request, beam, beams.num_candidates), id=new_request_id())
        return (await sample(step, shared)).top

    while not beams.is_over:
        likeliest = await all_of([following(beam) for beam in beams.running])
        num_sampled += len(likeliest)
        beams.advance(likeliest)
    return Found(tuple(_tokens(request, beam) for beam in beams.best(count)), num_sampled)


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Every result, in order. Raises the first error, once the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def _step(request: Request, beam: Beam, num_candidates: int) -> Request:
    """The request for one token behind `beam`. Those behind the first go on with what has been admitted, like a new attempt."""
    sampling = SamplingParams(
        temperature=0.0, seed=0, num_logprobs=num_candidates, max_tokens=len(beam.tokens) + 1
    )
    step = replace(request, sampling=sampling, hints=CacheHints(), resumption=None)  # hints are for the end
    return step.retry(beam.tokens) if beam.tokens else step


def _tokens(request: Request, beam: Beam) -> tuple[TokenOut, ...]:
    """A finished beam as it is told to the client, with what would have been likelier where that is wanted."""
    sampling, last = request.sampling, len(beam.tokens) - 1
    ended = FinishReason.STOP if beam.tokens[-1] in sampling.stop_token_ids else FinishReason.LENGTH
    return tuple(
        TokenOut(
            request_id=request.id,
            attempt=request.attempt,
            index=index,
            token=token,
            logprob=beam.logprobs[index] if sampling.num_logprobs >= 0 else None,
            top=tuple(beam.likeliest[index][: max(0, sampling.num_logprobs)]),
            finish=ended if index == last else None,
        )
        for index, token in enumerate(beam.tokens)
    )
