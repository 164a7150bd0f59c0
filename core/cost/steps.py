"""How long an instance's steps take, as it has learned itself. It is enough to predict a step of any size.

A step reads and computes at once, so it takes the longer of the two (the roofline: Williams et al., CACM 2009). Each is a plane,
and where they cross is learned with them. Where experts are routed reading is bent besides: each token uses a few of them, so
the more tokens a step has the fewer experts are left that none has used, and once all are read more tokens read no more."""

from dataclasses import dataclass, replace
from math import exp, expm1, inf, log1p, sqrt
from typing import Final

LEARNED_STEPS: Final = 20
"""A step-time model is known once so many were seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """duration = fixed_s + token_s x new tokens + context_s x sum of contexts + seq_s x sequences + pair_s x pairs
    - unread_s x exp(-unread_decay x new tokens); none is < 0, and unread_s is at most fixed_s.

    Pairs: of a query with a key that it attends to, counted where a piece of a prompt is computed. The last part is what reading
    takes less while some routed experts are used by no token. An older peer leaves it out, and takes all of them to be read."""

    fixed_s: float = 0.0
    token_s: float = 0.0
    context_s: float = 0.0
    """For each token of KV that is read."""
    seq_s: float = 0.0
    error: float = 0.0
    """Mean absolute error of recent predictions, each made before its step was seen, as a share of the duration."""
    num_steps: int = 0
    """Steps it was learned from; 0: nothing is known."""
    pair_s: float = 0.0
    unread_s: float = 0.0
    """What reading all routed experts takes; part of `fixed_s`."""
    unread_decay: float = 0.0
    """As `unread_decay` returns it; 0: no experts are routed."""

    def work_s(self, start_tokens: int, num_tokens: int) -> float:
        """Return how long so many tokens of a prompt that follow others take, beside the steps' own time."""
        return self.token_s * num_tokens + self.pair_s * chunk_pairs(start_tokens, num_tokens)

    def step_s(
        self, num_tokens: float, num_context_tokens: float, num_seqs: float, num_pairs: float = 0.0
    ) -> float:
        found_s = (
            self.fixed_s
            + self.token_s * num_tokens
            + self.context_s * num_context_tokens
            + self.seq_s * num_seqs
            + self.pair_s * num_pairs
        )
        return found_s - self.left_unread_s(num_tokens) if self.unread_s else found_s

    def left_unread_s(self, num_tokens: float) -> float:
        """Return what a step of so many tokens takes less than one that reads all routed experts."""
        return self.unread_s * exp(-self.unread_decay * num_tokens) if self.unread_s else 0.0

    def one_more_s(self, num_tokens: float) -> float:
        """Return what the next token adds to a step of so many, beside its context."""
        return self.token_s + self.left_unread_s(num_tokens) - self.left_unread_s(num_tokens + 1)


@dataclass(frozen=True, slots=True)
class StepModels:
    decode: StepModel = StepModel()
    """Steps in which every sequence computes one token; new tokens and sequences are the same number there. A step with a piece
    of a prompt reads as much, so it takes no less."""
    prompt: StepModel = StepModel()
    """What computing takes in steps with a piece of a prompt."""

    @property
    def lacks_reading(self) -> bool:
        """Whether steps are being learned from, but too few that only decode. Those with a piece of a prompt are as long as
        computing takes, so they do not show how long reading takes."""
        return self.prompt.num_steps > 0 and self.decode.num_steps < LEARNED_STEPS

    def mixed_step_s(
        self, num_tokens: float, num_context_tokens: float, num_seqs: float, num_pairs: float = 0.0
    ) -> float:
        """Return how long a step with a piece of a prompt takes."""
        return max(
            self.reads_s(num_tokens, num_context_tokens, num_seqs),
            self.prompt.step_s(num_tokens, num_context_tokens, num_seqs, num_pairs),
        )

    def reads_s(self, num_tokens: float, num_context_tokens: float, num_seqs: float) -> float:
        """Return what reading takes in such a step. The prompt's tokens use experts, too."""
        decode = self.decode
        all_s = decode.step_s(num_seqs, num_context_tokens, num_seqs) + decode.left_unread_s(num_seqs)
        return all_s - decode.left_unread_s(num_tokens)

    def beside(self, num_decoding: float, context_tokens: float, start_tokens: float) -> "PromptStepModel":
        """Return the model of steps that compute a piece of a prompt after its first `start_tokens`, beside others that decode. A
        piece is taken to read all routed experts."""
        decode, prompt = self.decode, self.prompt
        num_seqs, context = num_decoding + 1, context_tokens + start_tokens
        return PromptStepModel(
            reads_s=decode.step_s(num_seqs, context, num_seqs) + decode.left_unread_s(num_seqs),
            read_s=decode.context_s,
            computes_s=prompt.step_s(num_decoding, context, num_seqs),
            compute_s=prompt.token_s + prompt.context_s + prompt.pair_s * start_tokens,
            bend_s=prompt.pair_s / 2,
        )


@dataclass(frozen=True, slots=True)
class PromptStepModel:
    """duration of n prompt tokens = max(reads_s + read_s x n, computes_s + compute_s x n + bend_s x n^2), which only grows."""

    reads_s: float
    read_s: float
    computes_s: float
    compute_s: float
    bend_s: float

    def step_s(self, num_tokens: float) -> float:
        computes_s = self.computes_s + (self.compute_s + self.bend_s * num_tokens) * num_tokens
        return max(self.reads_s + self.read_s * num_tokens, computes_s)

    def tokens_within(self, limit_s: float) -> float:
        """Return how many tokens fit into a step of that length; infinite where nothing limits them."""
        if self.step_s(0) > limit_s:
            return 0.0
        reads = (limit_s - self.reads_s) / self.read_s if self.read_s else inf
        return min(reads, _root(self.bend_s, self.compute_s, limit_s - self.computes_s))

    @property
    def free_tokens(self) -> float:
        """The tokens that are computed while the step reads, and cost hardly anything: where the two cross."""
        return _root(self.bend_s, self.compute_s - self.read_s, self.reads_s - self.computes_s)


def _root(bend: float, slope: float, height: float) -> float:
    """Return the x >= 0 at which bend x^2 + slope x rises through `height`; 0 where it is above from the start."""
    if height <= 0 or height == inf:
        return max(0.0, height)
    root = slope + sqrt(slope * slope + 4 * bend * height)
    return 2 * height / root if root > 0 else inf


def chunk_pairs(start: int, count: int) -> float:
    """Return the pairs of `count` tokens of a prompt that follow `start` others, causal."""
    return count * (start + (count + 1) / 2)


def errors_of_mean(num_steps: float, sure_errors: float) -> float:
    """Return by how many times a single step's mean error the mean of so many steps is off, at most, where a single
    one is trusted up to `sure_errors` of them. What single ones are off evens out."""
    return sure_errors / sqrt(max(1.0, num_steps))


def unread_decay(expert_share: float, num_stages: int = 1) -> float:
    """Return by how much the logarithm of the share of unread experts falls with each token, which uses `expert_share` of them.
    Stages compute micro-batches, each of which reads its own. It is 0 where there are no experts, or each token reads all."""
    return -log1p(-expert_share) / num_stages if expert_share < 1 else 0.0


def read_share(unread_decay: float, num_tokens: float) -> float:
    """Return which part of the routed experts so many tokens are expected to use; 0 where there are none."""
    return -expm1(-unread_decay * num_tokens)


def with_experts(steps: StepModels, decay: float) -> StepModels:
    """Return `steps` with that `unread_decay`, if they have none."""
    if not decay or steps.decode.unread_decay:
        return steps
    return replace(steps, decode=replace(steps.decode, unread_decay=decay))


UNKNOWN_STEPS = StepModels()
