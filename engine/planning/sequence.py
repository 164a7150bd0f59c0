"""One sequence on one instance. Its state says which part of the planner has it, and alone changes it.

`tokens` are known; `num_pending` more were sampled by steps that have not been committed yet (lookahead). `num_computed` counts
tokens whose KV exists once every planned step has run."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from math import inf
from sys import maxsize

from core.messages import Grant
from core.plan import KVPush, NewSeq, Sampled, SampledToken
from core.types import FinishReason, Request, TokenId, TokenOut


class State(Enum):
    """What is done with a sequence, and by whom. Lifecycle passes it on, and ends it."""

    WAITING = auto()
    """Has no blocks. StepAdmission begins it."""
    RUNNING = auto()
    """StepComposer plans its work. When a step has ended, Committing gives it what was sampled, or Undoing takes its work
    back."""
    PREEMPTED = auto()
    """Lifecycle takes its blocks as soon as no step in flight writes them. Then it waits again."""
    RETURNING = auto()
    """Was preempted, and has no blocks. StepAdmission lets it wait again when its KV from lower tiers is in the prefix cache."""
    RESERVED = auto()
    """Has blocks that another instance writes, or will. PlannedReservations has it until these are written or given back."""
    PAUSED = auto()
    """Pushed. Undoing has taken its last work back, and what that has written may still be read by the pusher."""
    HELD = auto()
    """Computes no more. Its blocks are still being read by the pusher: Lifecycle waits for the release."""
    DONE = auto()


OVER = (State.HELD, State.DONE)
"""Nothing is computed any more."""


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    request: Request
    key: str = field(init=False)
    """`request.key`, which is made anew each time it is asked."""
    tokens: list[int]
    num_prompt: int
    arrival: int
    """Its place in the order of arrival on this instance."""
    push: Grant | None = None
    state: State = State.WAITING
    block_ids: list[int] = field(default_factory=list[int])
    table: tuple[int, ...] = ()
    """`block_ids` in the form that plans carry."""
    twins: list[int] = field(default_factory=list[int])
    """Cached blocks with the same content as private blocks of this sequence. They are referenced so that the cache keeps its
    prefix."""
    num_kept: int = 0
    """The number of leading blocks that the prefix cache has been offered."""
    num_cached: int = -1
    """The number of tokens whose KV was here when it was first given blocks; -1: it has had none yet."""
    num_computed: int = 0
    num_pending: int = 0
    num_in_flight: int = 0
    """The number of planned, uncommitted steps that compute something of this sequence."""
    num_pushed: int = 0
    """The number of leading tokens whose KV the pushes so far cover."""
    state_tokens: int = 0
    """The number of tokens whose place in the first blocks its recurrent state takes."""
    checkpoints: list[int] = field(default_factory=list[int])
    """The numbers of tokens behind which its state is still to be kept. A step ends at each of them."""
    passed_checkpoint: int = -1
    """The cached block with the last checkpoint of what it has generated; -1: there is none."""
    num_saved: int = 0
    """The number of leading blocks behind which lower tiers have got its state last."""
    first_token_at: float = inf
    """When an output token was first known on this instance."""
    num_first: int = 0
    """The number of output tokens that were known then."""
    num_unmasked: int = 0
    """The number of tokens known when the mask of the next one was late."""
    num_masked: int = 0
    """The number of tokens behind which a late mask is made. The ranks may say so before its lateness is known here."""
    run: tuple[TokenId, ...] = ()
    """What its grammar forces behind the known tokens, as far as the ranks have said."""
    end: int = maxsize
    """The number of tokens with which it ends at the latest: those of a context, or fewer, with as much output as it may have."""
    num_below: int = 0
    """The number of leading tokens of a sequence that has lost its blocks whose KV lower tiers were given."""
    rests_until: float = -inf
    """Until when it may pause at the longest (`engine.planning.preemption`)."""
    is_lost: bool = False
    """Whether it has lost its blocks, and lower tiers have not been asked for their KV since then."""
    announced: bool = False
    """Whether the ranks know this sequence."""
    aborted: bool = False

    def __post_init__(self) -> None:
        self.key = self.request.key
        self.end = min(self.end, self.num_prompt + self.request.sampling.max_tokens)

    @property
    def with_output(self) -> Request:
        """The request with all that was generated here."""
        return replace(self.request, emitted=tuple(self.tokens[self.num_prompt :]))

    @property
    def num_output(self) -> int:
        """The number of known output tokens, over all attempts."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_after_first(self) -> int:
        """The number of output tokens since `first_token_at`, planned ones included."""
        return self.num_output + self.num_pending - self.num_first

    @property
    def num_planned_tokens(self) -> int:
        return len(self.tokens) + self.num_pending

    @property
    def num_missing(self) -> int:
        """The number of tokens that a step could compute now."""
        return len(self.tokens) + self.num_pending - self.num_computed

    def put_off(self) -> None:
        """The sample behind the last known token was put off. Take back the token and what was planned to follow it."""
        self.num_unmasked = len(self.tokens)
        self.num_computed, self.num_pending = len(self.tokens) - 1, 0

    @property
    def is_complete(self) -> bool:
        """Whether the last token is already being sampled, so that nothing more may be."""
        if self.num_pending == 0:
            return False
        return self.push is not None or len(self.tokens) + self.num_pending >= self.end

    def has_image_from(self, start: int) -> bool:
        """Whether any of its tokens from `start` on stands for an image."""
        images = self.request.images
        return bool(images) and any(image.end > start for image in images)

    def know(self, tokens: Iterable[int], now: float) -> None:
        """Append tokens that have been sampled."""
        self.tokens += tokens
        if self.first_token_at == inf:
            self.first_token_at, self.num_first = now, self.num_output

    def as_new(self) -> NewSeq:
        """Return what the ranks learn before they compute what follows `num_computed` tokens."""
        request = self.request
        tokens = request.prompt + tuple(self.tokens[self.num_prompt :])
        images = tuple(image for image in request.images if image.end > self.num_computed)
        shift = sum(image.position_shift for image in request.images)
        return NewSeq(self.key, tokens, self.num_prompt, request.sampling, images, shift)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the last known token ends the sequence. None where it goes on."""
        sampling, tokens = self.request.sampling, self.tokens
        if tokens[-1] in sampling.stop_token_ids and len(tokens) - self.num_prompt > sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(tokens) >= self.end else None

    def learn(self, sampled: Sampled, now: float) -> list[TokenOut]:
        """Append what a step has sampled, up to the token that ends the output. Returns it in the form that the client's side
        gets. The KV of all known tokens but the last exists then, since drafts that were right have been computed."""
        request, tokens = self.request, self.tokens
        out: list[TokenOut] = []
        if self.first_token_at == inf:
            self.first_token_at, self.num_first = now, self.num_output + 1
        every: tuple[Sampled | SampledToken, ...] = (sampled, *sampled.more) if sampled.more else (sampled,)
        for one in every:
            tokens.append(one.token)
            finish = self.finish_reason
            out.append(
                TokenOut(
                    request_id=request.id,
                    attempt=request.attempt,
                    index=len(tokens) - self.num_prompt - 1,
                    token=one.token,
                    logprob=one.logprob,
                    top=one.top,
                    finish=finish,
                )
            )
            if finish is not None:
                break
        if out[0].index == 0:
            out[0] = replace(out[0], num_cached=max(0, self.num_cached))
        self.num_computed += len(out) - 1
        self.run = sampled.run
        if sampled.prompt_scores or sampled.embedding:
            out[0] = replace(out[0], prompt_scores=sampled.prompt_scores, embedding=sampled.embedding)
        return out

    def grow(self, blocks: list[int]) -> None:
        if blocks:
            self.block_ids += blocks
            self.table = tuple(self.block_ids)

    def next_push(self, end: int) -> KVPush | None:
        """Return what is to be sent on once the KV of the first `end` tokens is computed, and count it as sent. A recurrent state
        is sent when it has all known tokens."""
        grant = self.push
        if grant is None:
            return None
        state = self.state_tokens
        is_whole, end = end == self.num_planned_tokens, end + state
        start = max(self.num_pushed, grant.first_token, state)
        end = min(end, grant.first_token + grant.num_tokens + grant.room_tokens)
        if end <= start:
            return None
        self.num_pushed = end
        return KVPush(grant.id, start, end - start, state if is_whole else 0)
