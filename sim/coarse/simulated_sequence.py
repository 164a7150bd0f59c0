"""A request in the coarse simulation, and what one instance has of it. No token has a value here, only a number.

Prompts are sequences of block ids: two prompts share as many leading blocks as they have equal leading ids."""

import math
from dataclasses import dataclass, field

from core.types import Request
from engine.planning.sequence import Sequence


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedRequest:
    """One request, from arrival to its last token. Times are absolute, and infinite until they happen: also the arrival of a turn
    that follows another."""

    request: Request
    ids: tuple[int, ...]
    """One for each block of the prompt; that of a last, partial block is nobody else's."""
    hashes: tuple[int, ...]
    """Hashes of the full blocks, chained as `core.kv.block_hashes` does it."""
    num_prompt: int
    may_recur: bool = True
    """Whether another prompt may go on from what this one leaves. Where none does in a whole load, caches keep only what is
    preempted: what else they would keep counts as free, and is never found. All that happens is the same, but that a preempted
    request may find more of its own prompt again, since nothing that is never found is kept in its place."""
    then: "SimulatedRequest | None" = None
    """The next turn of its session. It arrives `after_s` seconds after this one's last token, or its refusal, was seen."""
    after_s: float = 0.0
    answer_ids: tuple[int, ...] = ()
    """Names of the blocks from the prompt's last full one on, under which the next turn has this one's answer in its prompt."""
    first_at: float = math.inf
    last_at: float = math.inf
    num_output: int = 0
    rejected: str = ""

    @property
    def max_tokens(self) -> int:
        return self.request.sampling.max_tokens


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedSequence:
    """One job on one instance: what a worker policy may ask of a sequence, and its blocks.

    While it decodes its counters stand still: `Device` knows how many steps it has taken part in since `joined_step`."""

    job: SimulatedRequest
    address: str
    arrival: int
    """Order of arrival on this instance."""
    num_known: int
    ready_at: float
    """Steps that are planned before this know nothing of it."""
    blocks: Sequence
    """Its blocks as the production ledger keeps them; there a token is a block's id, and the block size 1."""
    num_computed: int = 0
    first_token_at: float = math.inf
    """When its first output token was on this instance."""
    holder: "SimulatedSequence | None" = None
    """The sequence on the other instance for which this prompt is computed."""
    num_pushed: int = 0
    num_below: int = 0
    """The number of its leading tokens whose KV host memory keeps, since it was preempted."""
    rests_until: float = -math.inf
    """Until when it may pause at the longest."""
    joined_step: int = -1
    grow_step: int = -1
    mark_step: int = -1
    finish_step: int = -1

    @property
    def request(self) -> Request:
        return self.job.request

    @property
    def num_prompt(self) -> int:
        return self.job.num_prompt

    @property
    def block_ids(self) -> list[int]:
        return self.blocks.block_ids

    @property
    def num_missing(self) -> int:
        return self.num_known - self.num_computed

    @property
    def num_output(self) -> int:
        return self.num_known - self.job.num_prompt

    @property
    def num_after_first(self) -> int:
        """Output tokens since `first_token_at`, with the one that the next step samples."""
        return self.num_output

    @property
    def tokens(self) -> range:
        """As many as are known."""
        return range(self.num_known)


@dataclass(slots=True)
class Rate:
    """Moving averages that a load report carries, as `engine.loop.Engine` keeps them."""

    tokens_per_s: float = 0.0
    step_s: float = 0.0
    smoothing: float = field(default=0.2)

    def observe(self, step_s: float, prompt_tokens: int, num_steps: int) -> None:
        weight = 1 - (1 - self.smoothing) ** num_steps
        self.step_s = _toward(self.step_s, step_s, weight)
        if prompt_tokens >= 8:
            self.tokens_per_s = _toward(self.tokens_per_s, prompt_tokens / step_s, weight)


def _toward(old: float, new: float, weight: float) -> float:
    return new if old == 0 else old + weight * (new - old)
