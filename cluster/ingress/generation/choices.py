"""Runs the choices of one HTTP request and turns their tokens into pieces of text, in the order in which they come."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.ingress.delivery.beam_search import BeamParams
from cluster.ingress.delivery.generator import ChatTokenizer
from cluster.ingress.delivery.generator import Generator as TokenGenerator
from cluster.ingress.delivery.search_steps import Found, all_of
from cluster.ingress.delivery.shared_prompt import SharedPrompt
from cluster.ingress.generation.answer_identity import Begun
from cluster.ingress.generation.detokenize import TextStream
from cluster.ingress.parsers.output_events import OutputEvent, OutputParser, PlainParser, Text
from cluster.ingress.parsers.stop_strings import StopStrings
from cluster.ingress.telemetry import request_context
from cluster.ingress.telemetry.metrics import IngressMetrics
from cluster.ingress.tenants.access import KeyHolder
from cluster.ingress.tenants.account import RunningUse
from cluster.ingress.tenants.ledger import UsageLedger
from cluster.store.usage_port import UsageCounts
from core.clock import current_time
from core.config.adapter_config import adapter_name
from core.errors import Overloaded, TargetOutOfReach
from core.types import FinishReason, PromptScore, Request, TokenOut


@dataclass(frozen=True, slots=True)
class ChoiceStream:
    """One sequence to generate: the `index`-th choice of the response."""

    index: int
    request: Request
    text: TextStream
    parser: OutputParser = field(default_factory=PlainParser)
    stops: StopStrings = field(default_factory=StopStrings)
    """What the parser ends the text at."""
    prompt_only: bool = False
    """Whether only the prompt is of interest, and not the token that is sampled."""
    shared: SharedPrompt | None = None
    """With the other choices of its prompt; None: it is the only one."""
    begun: Begun = field(default_factory=Begun)
    """What it has brought before."""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What one token adds to a choice. `token` is None for text that was held back until the end."""

    index: int
    token: TokenOut | None
    finish: FinishReason | None
    events: tuple[OutputEvent, ...] = ()
    is_reasoning: bool = False
    """Whether the token belongs to the reasoning or its marks."""
    leads: bool = False
    """Whether the token is the first with a text, from which some decoders drop a space."""
    at: float = 0.0
    """When the token came; 0 in what a beam search has found."""

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Text))


def num_prompt_tokens(choices: Sequence[ChoiceStream], num_prompts: int) -> int:
    """The number of prompt tokens. Each prompt counts once, not for each of its choices."""
    per_prompt = len(choices) // num_prompts
    return sum(len(choice.request.prompt) for choice in choices[::per_prompt])


class UsageCounter:
    """Counts what an answer uses, piece by piece."""

    def __init__(self, choices: Sequence[ChoiceStream], num_prompts: int) -> None:
        self._choices, self._num_prompts = choices, num_prompts
        self._per_prompt = len(choices) // num_prompts
        self._num_output = self._num_reasoning = self._num_cached = 0
        self._num_new = self._num_new_reasoning = 0
        """How many of these are not in the ledger yet."""
        self._times: dict[int, tuple[float, float]] = {}
        """By choice, when its first token came, and its last."""
        self.num_tokens = [0] * len(choices)
        """How many tokens of each choice were counted, at this time or before."""

    def count(self, piece: TextPiece) -> None:
        if piece.token is not None:
            self._num_output += 1
            self.num_tokens[piece.index] = piece.token.index + 1
            if piece.token.index >= self._choices[piece.index].begun.num_noted:
                self._num_new += 1
                self._num_new_reasoning += piece.is_reasoning
                self._times[piece.index] = self._times.get(piece.index, (piece.at, 0.0))[0], piece.at
        self._num_reasoning += piece.is_reasoning
        # The first choice of a prompt is the one for which it is computed.
        if piece.token is not None and piece.token.index == 0 and piece.index % self._per_prompt == 0:
            self._num_cached += piece.token.num_cached

    @property
    def counts(self) -> UsageCounts | None:
        """Return what is to be paid for; None where nothing was delivered that is not in the ledger."""
        if not self._num_new:
            return None
        firsts = self._choices[:: self._per_prompt]
        begins = not any(choice.begun.num_noted for choice in self._choices)
        return UsageCounts(
            int(begins),
            num_prompt_tokens(self._choices, self._num_prompts) if begins else 0,
            self._num_cached if begins else 0,
            0 if self._choices[0].prompt_only else self._num_new,
            self._num_new_reasoning,
            sum(len(choice.request.images) for choice in firsts) if begins else 0,
            sum(last_at - first_at for first_at, last_at in self._times.values()),
        )

    @property
    def usage(self) -> dict[str, Any]:
        num_prompt = num_prompt_tokens(self._choices, self._num_prompts)
        num_output = 0 if self._choices[0].prompt_only else self._num_output
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
            "completion_tokens_details": {"reasoning_tokens": self._num_reasoning},
        }


class ChoiceRunner:
    def __init__(
        self,
        generator: TokenGenerator,
        tokenizer: ChatTokenizer,
        metrics: IngressMetrics,
        model_name: str,
        ledger: UsageLedger,
    ) -> None:
        self._generator, self._metrics, self._ledger = generator, metrics, ledger
        self._model_name = model_name
        self.tokenizer = tokenizer

    async def run(
        self, choices: Sequence[ChoiceStream], num_prompts: int, holder: KeyHolder, at_once: int = sys.maxsize
    ) -> AsyncGenerator[TextPiece, None]:
        """Yield the pieces of all choices, `at_once` of them interleaved, on `holder`'s account.

        Closing it, or an error in one choice, cancels every choice. Raises Overloaded or RequestError before the first piece when
        that is more than the tenant may have now."""
        num_prompt = 0 if choices[0].begun.num_paid >= 0 else num_prompt_tokens(choices, num_prompts)
        tenant = holder.tenant
        async with self._running(choices, min(len(choices), at_once), num_prompt, holder) as use:
            self._metrics.tenant_tokens.labels(tenant.name, "prompt").inc(num_prompt)
            self._metrics.num_choices.observe(len(choices) // num_prompts)
            output = self._metrics.tenant_tokens.labels(tenant.name, "output")
            per_prompt = len(choices) // num_prompts
            scored = _with_scores(self._all(choices, at_once), choices, per_prompt)
            with self._counted(choices, num_prompts, holder) as used:
                async with aclosing(scored) as pieces:
                    async for piece in pieces:
                        used.count(piece)
                        choice = choices[piece.index]
                        is_new = piece.token is not None and piece.token.index >= choice.begun.num_paid
                        if is_new and not choice.prompt_only:
                            use.spend(1)
                            output.inc()
                        yield piece
            if use.num_output:
                tenant.likely_output.ended(use.num_output / len(choices))

    async def search(
        self, choices: Sequence[ChoiceStream], num_prompts: int, holder: KeyHolder, beams: BeamParams
    ) -> AsyncGenerator[TextPiece, None]:
        """Pieces of the answers that a beam search finds to each prompt, best first, once all are known. As `run` otherwise. The
        tenant pays for each beam's tokens, also where the beam is not among the answers."""
        num_prompt, metrics = num_prompt_tokens(choices, num_prompts), self._metrics
        per_prompt = len(choices) // num_prompts
        groups = [choices[first : first + per_prompt] for first in range(0, len(choices), per_prompt)]
        tenant = holder.tenant
        async with self._running(choices, beams.width * num_prompts, num_prompt, holder) as use:
            metrics.tenant_tokens.labels(tenant.name, "prompt").inc(num_prompt)
            metrics.num_choices.observe(per_prompt)
            found = await all_of(self._search(group, beams) for group in groups)
            num_sampled = sum(one.num_sampled for one in found)
            use.spend(num_sampled)
            metrics.tenant_tokens.labels(tenant.name, "output").inc(num_sampled)
        with self._counted(choices, num_prompts, holder) as used:
            for group, one in zip(groups, found, strict=True):
                for choice, tokens in zip(group, one.beams, strict=True):
                    for token in tokens:
                        piece = _piece(choice, token)
                        used.count(piece)
                        yield piece

    def _running(
        self, choices: Sequence[ChoiceStream], num_sequences: int, num_prompt: int, holder: KeyHolder
    ) -> AbstractAsyncContextManager[RunningUse]:
        likely = holder.tenant.likely_output
        num_output = sum(likely.of(c.request.sampling.max_tokens) for c in choices if not c.prompt_only)
        return holder.account.running(num_sequences, num_prompt, num_output, self._model_of(choices[0]))

    @contextmanager
    def _counted(
        self, choices: Sequence[ChoiceStream], num_prompts: int, holder: KeyHolder
    ) -> Generator[UsageCounter]:
        """Count what is delivered, and write it down before the client has the end. The instance that may be asked
        for it again hears how much that is."""
        used = UsageCounter(choices, num_prompts)
        try:
            yield used
        finally:
            if (counts := used.counts) is not None:
                self._ledger.note(
                    counts,
                    tenant=holder.tenant.name,
                    key_id=holder.key_id,
                    model=self._model_of(choices[0]),
                    slo_class=choices[0].request.slo.name,
                    batch=request_context.route.get() == "/v1/batches",
                )
            for choice, num_tokens in zip(choices, used.num_tokens, strict=True):
                if choice.request.resumption is not None:
                    num_noted = num_tokens if choice.begun.num_noted < sys.maxsize else 0
                    self._generator.noted(choice.request, num_noted, choice.begun.kept_at)

    def _model_of(self, choice: ChoiceStream) -> str:
        return adapter_name(choice.request.adapter) or self._model_name

    async def _search(self, group: Sequence[ChoiceStream], beams: BeamParams) -> Found:
        metrics, request = self._metrics, group[0].request
        metrics.running.inc(beams.width)
        try:
            found = await self._generator.search(request, beams, len(group))
        except asyncio.CancelledError:
            metrics.cancelled.inc()
            metrics.finished.labels("abort").inc()
            raise
        except Exception as error:
            _count(metrics, error)
            raise
        finally:
            metrics.running.dec(beams.width)
        metrics.prompt_tokens.inc(len(request.prompt))
        metrics.e2e_s.observe(current_time() - request.arrival_at)
        for tokens in found.beams:
            metrics.output_tokens.inc(len(tokens))
            if (finish := tokens[-1].finish) is not None:
                metrics.finished.labels(finish.value).inc()
        return found

    def _all(self, choices: Sequence[ChoiceStream], at_once: int) -> AsyncGenerator[TextPiece, None]:
        return self._one(choices[0]) if len(choices) == 1 else self._merged(choices, at_once)

    async def _merged(self, choices: Sequence[ChoiceStream], at_once: int) -> AsyncGenerator[TextPiece, None]:
        queue: asyncio.Queue[TextPiece | Exception | None] = asyncio.Queue()
        gate = asyncio.Semaphore(at_once)
        tasks = [asyncio.create_task(self._feed(choice, queue, gate)) for choice in choices]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _feed(
        self,
        choice: ChoiceStream,
        queue: "asyncio.Queue[TextPiece | Exception | None]",
        gate: asyncio.Semaphore,
    ) -> None:
        try:
            async with gate, aclosing(self._one(choice)) as pieces:
                async for piece in pieces:
                    queue.put_nowait(piece)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    async def _one(self, choice: ChoiceStream) -> AsyncGenerator[TextPiece, None]:
        metrics = self._metrics
        last: float | None = None
        finished = False
        metrics.running.inc()
        try:
            async with aclosing(self._generator.generate(choice.request, choice.shared)) as tokens:
                async for token in tokens:
                    now = current_time()
                    if last is None:
                        metrics.prompt_tokens.inc(len(choice.request.prompt))
                        metrics.ttft_s.observe(now - choice.request.arrival_at)
                    else:
                        metrics.itl_s.observe(now - last)
                    metrics.output_tokens.inc()
                    last = now
                    piece = _piece(choice, token, now)
                    if finished := piece.finish is not None:
                        metrics.finished.labels(piece.finish.value).inc()
                        metrics.e2e_s.observe(now - choice.request.arrival_at)
                    yield piece
                    if finished:
                        return
        except Exception as error:
            _count(metrics, error)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            if not finished:
                metrics.cancelled.inc()
                metrics.finished.labels("abort").inc()
            raise
        finally:
            metrics.running.dec()


async def _with_scores(
    pieces: AsyncGenerator[TextPiece, None], choices: Sequence[ChoiceStream], per_prompt: int
) -> AsyncGenerator[TextPiece, None]:
    """Yield the pieces so that each choice's first token has the scores of its prompt, where those are wanted. Only a prompt's
    first choice computes them. The others' pieces wait for them."""
    scores: dict[int, tuple[PromptScore, ...]] = {}
    waiting: dict[int, list[TextPiece]] = {}
    async with aclosing(pieces):
        async for piece in pieces:
            prompt, choice = divmod(piece.index, per_prompt)
            if choices[prompt * per_prompt].request.sampling.num_prompt_logprobs < 0:
                yield piece
            elif prompt in scores:
                yield _scored(piece, scores[prompt])
            elif choice or piece.token is None:
                waiting.setdefault(prompt, []).append(piece)
            else:
                scores[prompt] = piece.token.prompt_scores
                yield piece
                for other in waiting.pop(prompt, ()):
                    yield _scored(other, scores[prompt])


def _scored(piece: TextPiece, scores: tuple[PromptScore, ...]) -> TextPiece:
    """Return the piece with its prompt's scores, if it is a choice's first."""
    if piece.token is None or piece.token.index:
        return piece
    return replace(piece, token=replace(piece.token, prompt_scores=scores))


def _count(metrics: IngressMetrics, error: Exception) -> None:
    """Count a sequence that ended in an error."""
    match error:
        case Overloaded():
            metrics.rejected.inc()
        case TargetOutOfReach():
            metrics.hopeless.inc()
        case _:
            metrics.failed.inc()


def _piece(choice: ChoiceStream, token: TokenOut, at: float = 0.0) -> TextPiece:
    """Return a token's piece. A stop token ends the text and is no part of it. A stop string, or the last call allowed, ends it
    where it was found."""
    if choice.prompt_only:
        return TextPiece(choice.index, token, FinishReason.LENGTH, at=at)
    text, parser, was_reasoning = choice.text, choice.parser, choice.parser.is_reasoning
    finish, leads = token.finish, not text.has_begun
    choice.stops.begin_token()
    if finish is FinishReason.STOP:
        new = text.finish(token.token)
    else:
        new = text.push(token.token) + ("" if finish is None else text.finish())
    events = parser.push(new)
    if choice.stops.found is not None or parser.is_complete:
        finish = FinishReason.STOP
    is_reasoning = was_reasoning or parser.is_reasoning
    if finish is not None:
        events += parser.finish(cut=finish is FinishReason.LENGTH)
        if choice.stops.found is not None:
            finish = FinishReason.STOP
    return TextPiece(choice.index, token, finish, events, is_reasoning, leads, at)
