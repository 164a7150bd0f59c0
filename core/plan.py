"""The only messages between an engine's scheduler and its ranks. A step knows tokens computed and tokens known, no phases."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from core.cost.steps import chunk_pairs
from core.prompt_images import PromptImage
from core.records import record
from core.types import PromptScore, SamplingParams, TokenId

PROPOSED: TokenId = -1
"""In place of a draft token that the rank makes itself, with a draft model or a head."""


@dataclass(frozen=True, slots=True)
class NewSeq:
    """All that a rank must learn about a sequence, once, before its first work. Ranks append what they sample themselves."""

    key: str
    tokens: tuple[TokenId, ...]
    num_prompt: int
    """Length of the client's prompt inside `tokens`; the rest is output of earlier attempts (counted by penalties)."""
    sampling: SamplingParams
    images: tuple[PromptImage, ...] = ()
    """The images of which something is still to be computed. Their tokens are the vocabulary's here."""
    position_shift: int = 0
    """What is added to the number of a token behind all images of the prompt for its position (`PromptImage.position_shift`)."""


@dataclass(frozen=True, slots=True)
class KVPush:
    """After each layer of this work, send the KV of tokens [start, start + count) to the holder of grant `grant_id`. Tokens are
    counted in the sequence's blocks: behind those that its recurrent state takes the place of."""

    grant_id: str
    start: int
    count: int
    state_tokens: int = 0
    """With it what lies in the place of this many first tokens, the recurrent state."""


@record(kw_only=True)
class SeqWork:
    """Compute the KV of tokens [start, start + count) of one sequence.

    `block_ids` covers tokens [0, start + count). Tokens beyond those in `NewSeq` are the rank's own samples, which the
    planner may not know yet (lookahead)."""

    key: str
    start: int
    count: int
    block_ids: tuple[int, ...]
    samples: bool
    """Sample the next token from the logits of the last position."""
    push: KVPush | None = None
    drafts: tuple[TokenId, ...] = ()
    """Draft tokens of what will be sampled: the last of the `count` tokens. A token is sampled behind the one before them, and
    behind each of them that was right. All of them may be PROPOSED."""
    adapter: str = ""
    """As in `Request`."""
    has_image: bool = False
    """Whether any of the sequence's tokens from `start` on stands for an image."""
    both_ways: tuple[tuple[int, int], ...] = ()
    """(first token, number of tokens) of each run of the work's tokens that attend to each other in both directions, in order.
    Each is whole, but for what is computed of it already."""

    @property
    def known_end(self) -> int:
        """The number of the sequence's tokens up to the first draft token: the place of the token that it samples."""
        return self.start + self.count - len(self.drafts)

    @property
    def num_samples(self) -> int:
        """The number of rows that a token is sampled from, if it samples."""
        return 1 + len(self.drafts)

    @property
    def is_prompt_piece(self) -> bool:
        """Whether it computes several known tokens. Draft tokens do not count."""
        return self.count - len(self.drafts) > 1


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first `num_tokens` slots of block `src` to `dst`, all layers, before the step's work (shared partial prefix)."""

    src: int
    dst: int
    num_tokens: int


class StepSize(NamedTuple):
    num_tokens: int
    num_context: int
    """Tokens of KV that the step's own follow, and they themselves."""
    num_prompt: int
    """The tokens that are pieces of prompts; 0 where the step only decodes."""
    num_pairs: float
    """As `core.cost.steps.StepModel` counts them."""
    num_drafts: int
    num_plain: int
    """The works that compute one token, sample the next one, and have nothing else to them: nothing is pushed, and there are no
    draft tokens, adapters or images."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    step: int
    new: tuple[NewSeq, ...]
    copies: tuple[BlockCopy, ...]
    work: tuple[SeqWork, ...]
    drop: tuple[str, ...]
    """Keys whose rank-side state goes away (before `new` is applied)."""
    groups: tuple[tuple[SeqWork, ...], ...] = ()
    """In a rank's share of a plan, where groups of ranks meet at the experts: the work of each as it was planned, the rank's own
    first. All groups decide by it, so that all decide alike, whatever each of them has proposed since then."""

    @cached_property
    def size(self) -> StepSize:
        """How much it computes."""
        num_tokens = num_context = num_prompt = num_drafts = num_plain = 0
        num_pairs = 0.0
        for work in self.work:
            start, count = work.start, work.count
            num_tokens += count
            num_context += start + count
            if count == 1:
                num_plain += work.samples and not (
                    work.adapter or work.push or work.has_image or work.both_ways
                )
            else:
                num_drafts += len(work.drafts)
                if work.is_prompt_piece:
                    num_prompt += count
                    num_pairs += chunk_pairs(start, count)
        return StepSize(num_tokens, num_context, num_prompt, num_pairs, num_drafts, num_plain)

    @property
    def only_decodes(self) -> bool:
        """Whether each work is a plain one: each sequence decodes."""
        return self.size.num_plain == len(self.work)

    @property
    def num_tokens(self) -> int:
        return self.size.num_tokens


@record()
class SampledToken:
    token: TokenId
    logprob: float | None = None
    top: tuple[tuple[TokenId, float], ...] = ()


@record()
class Sampled:
    key: str
    token: TokenId
    logprob: float | None = None
    top: tuple[tuple[TokenId, float], ...] = ()
    prompt_scores: tuple[PromptScore, ...] = ()
    embedding: bytes = b""
    more: tuple[SampledToken, ...] = ()
    """The tokens behind it: one for each of the work's first drafts that were right."""
    run: tuple[TokenId, ...] = ()
    """The tokens that the sequence's grammar forces behind all of these, as far as is known."""
    num_unmade: int = 0
    """The number of the work's PROPOSED draft tokens that the rank has not made."""

    @property
    def tokens(self) -> list[TokenId]:
        return [self.token, *(sampled.token for sampled in self.more)]


@dataclass(frozen=True, slots=True)
class FailedSeq:
    """A sequence that a step could not compute, through no fault of the ranks."""

    key: str
    reason: str
    """A sentence without its full stop."""


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """How often each expert of a layer was chosen since the last report."""

    layer: int
    counts: tuple[int, ...]
    imbalance: float = 1.0
    """The recent load of the busiest of the ranks that share these experts, divided by the mean."""
    num_moves: int = 0
    """The number of experts that have been put into other slots so far."""


@record(kw_only=True)
class StepResult:
    """A work with `samples` may be without a token: what its grammar allows was not known in time, so that its sample was put
    off. `WorkerGroup.on_ready` says when its last token can be computed again, and the next one sampled."""

    step: int
    sampled: tuple[Sampled, ...]
    """In the order of the plan."""
    duration_s: float = 0.0
    expert_loads: tuple[ExpertLoad, ...] = ()
    """Not every step has them."""
    replayed: bool = False
    """Whether its launches had been captured before."""
    proposing_s: float = 0.0
    """How long the rank has made draft tokens before the step; 0 where it has read much that it had not seen, too."""
    reading_s: float = 0.0
    """How long both have taken then."""
    failed: tuple[FailedSeq, ...] = ()
    """Nothing that the step has written or sampled of these is of use."""
