"""Learns how long this instance's steps take, from the steps themselves.

A step with a prompt takes the longer of what it reads and what it computes (`core.cost.steps`). Steps that only decode show what
reading takes. A step that took longer than its reading shows what computing takes; one that took no longer shows only that
computing takes no more, and teaches nothing where that is known. Where experts are routed, a part of what reading takes goes by
how many of them a step's tokens are expected to use.

Each of the two is learned by recursive least squares with forgetting, on relative errors: each equation is divided by its
duration, so that a short step counts as much as a long one. Invariant: what `model` gives has no negative part, and predicts the
same for an average step as the raw fit."""

from core.cost.steps import UNKNOWN_STEPS, StepModel, StepModels, read_share
from core.plan import StepPlan
from engine.planning.least_squares import Five, LeastSquares, dot, quotient

_SCALES: Five = (1.0, 512.0, 65_536.0, 64.0, 4e6)
"""Sizes of ordinary features. They scale the features so that none outweighs the others. The last one is of pairs, of which steps
that only decode have none: their last feature is the share of the routed experts that is read."""
_NOTHING: Five = (0.0, 0.0, 0.0, 0.0, 0.0)
_PRIOR_VARIANCE = 1.0
"""A coefficient's variance, in seconds^2 per scaled feature, before anything was seen."""
_SMOOTHING = 0.05
_TRUSTED_STEPS = 20
_LOST = 0.5
"""A model whose predictions are off by more in the mean knows nothing, and is learned anew, from nothing: it may have seen steps
that were held up for seconds, by compilers, or only prompts that were alone and all alike, of which it took the contexts for
what takes long."""
_NEAR, _FAR = 0.05, 0.2
"""A step that took no more than a share longer than its reading was not made longer by computing. The share is between these
two: more where predictions of reading are off by more."""
_OUTLIER, _ERRORS, _LEAST = 0.5, 4.0, 0.05
"""A step whose duration is off by more than so many times what steps usually are was disturbed, and teaches no more than this.
The limit is between a twentieth and half of the duration."""


def expected_s(plan: StepPlan, steps: StepModels) -> float:
    """Return how long a step takes by what `steps` say."""
    size = plan.size
    if not size.num_prompt:
        return steps.decode.step_s(size.num_tokens, size.num_context, len(plan.work))
    return steps.mixed_step_s(size.num_tokens, size.num_context, len(plan.work), size.num_pairs)


class StepFit:
    """The fit of one plane. `prior` is what a profile says, to begin with; where that has an `unread_decay` experts are routed,
    and the plane is that of steps that only decode."""

    def __init__(self, prior: StepModel = UNKNOWN_STEPS.decode) -> None:
        self._decay = prior.unread_decay
        self._scales: Five = (*_SCALES[:4], 1.0 if self._decay else _SCALES[4])
        theta = _NOTHING
        variance = _PRIOR_VARIANCE
        if prior.num_steps:
            fixed, token, context, seq, last = self._scales
            theta = (
                (prior.fixed_s - prior.unread_s) * fixed,
                prior.token_s * token,
                prior.context_s * context,
                prior.seq_s * seq,
                (prior.unread_s if self._decay else prior.pair_s) * last,
            )
            variance = 1e-6
        self._squares = LeastSquares(theta, variance)
        self._mean = self._scales
        self._num_learned = self._num_steps = prior.num_steps
        self._error = prior.error

    def observe(
        self,
        num_tokens: int,
        num_context_tokens: int,
        num_seqs: int,
        duration_s: float,
        num_pairs: float = 0.0,
    ) -> None:
        """Learn that one step has taken `duration_s` (> 0)."""
        last = read_share(self._decay, num_tokens) if self._decay else num_pairs
        raw = (1.0, num_tokens, num_context_tokens, num_seqs, last)
        share = dot(quotient(raw, self._scales), self._squares.theta) / duration_s
        self.learn(raw, duration_s)
        self.predicted(share)

    def predicted(self, share: float) -> None:
        """Note that a step was seen, and that this share of its duration had been predicted."""
        if self._num_steps:
            self._error += _SMOOTHING * (min(1.0, abs(1.0 - share)) - self._error)
        self._num_steps += 1
        if self._error > _LOST and self._num_learned > _TRUSTED_STEPS:
            self._squares = LeastSquares(_NOTHING, _PRIOR_VARIANCE)
            self._num_learned = self._num_steps = 0
            self._error = 0.0

    def learn(self, raw: Five, duration_s: float, other_s: float = 0.0) -> None:
        """Learn from a step. `other_s` is what it should have taken by the other plane: only what it took beyond that is new."""
        scaled = quotient(raw, self._scales)
        x = quotient(scaled, (duration_s, duration_s, duration_s, duration_s, duration_s))
        residual = 1.0 - dot(x, self._squares.theta)
        if self._num_learned > _TRUSTED_STEPS:
            residual = min(residual, 1.0 - other_s / duration_s) if residual > 0 else residual
            limit = min(_OUTLIER, max(_LEAST, _ERRORS * self._error))
            residual = max(-limit, min(limit, residual))
        self._num_learned += 1
        self._mean = _nearer(self._mean, raw)
        self._squares.learn(x, residual)

    @property
    def has_learned(self) -> bool:
        return self._num_learned > 0

    def assume(self, token_s: float) -> None:
        """Until something is learned, take a step to be nothing but its tokens, none of which takes longer than `token_s`."""
        fixed, known, context, seq, pair = self._squares.theta
        scaled = token_s * _SCALES[1]
        self._squares.theta = fixed, min(known, scaled) if known else scaled, context, seq, pair

    def model(self) -> StepModel:
        fixed, token, context, seq, last = quotient(self._squares.theta, self._scales)
        _, tokens, contexts, seqs, lasts = self._mean
        parts = max(0.0, token), max(0.0, context), max(0.0, seq), max(0.0, last)
        excess = (parts[0] - token) * tokens + (parts[1] - context) * contexts
        excess = excess + (parts[2] - seq) * seqs + (parts[3] - last) * lasts
        fixed, last = fixed - excess, parts[3]
        if fixed < 0 and self._decay:
            # Where all steps read all experts nothing tells these from what is fixed.
            last = max(0.0, last + fixed / lasts)
        unread, pair = (last, 0.0) if self._decay else (0.0, last)
        return StepModel(
            fixed_s=max(0.0, fixed) + unread,
            token_s=parts[0],
            context_s=parts[1],
            seq_s=parts[2],
            error=self._error,
            num_steps=self._num_steps,
            pair_s=pair,
            unread_s=unread,
            unread_decay=self._decay,
        )


def _nearer(mean: Five, raw: Five) -> Five:
    """Return the running mean behind one more."""
    m0, m1, m2, m3, m4 = mean
    r0, r1, r2, r3, r4 = raw
    return (
        m0 + _SMOOTHING * (r0 - m0),
        m1 + _SMOOTHING * (r1 - m1),
        m2 + _SMOOTHING * (r2 - m2),
        m3 + _SMOOTHING * (r3 - m3),
        m4 + _SMOOTHING * (r4 - m4),
    )


class StepFits:
    """The fits of both planes of one instance."""

    def __init__(self, prior: StepModels | None = None) -> None:
        prior = prior or UNKNOWN_STEPS
        self._decode, self._prompt = StepFit(prior.decode), StepFit(prior.prompt)
        self.models = StepModels(self._decode.model(), self._prompt.model())

    def observe(self, plan: StepPlan, duration_s: float) -> None:
        """Learn that `plan` has taken `duration_s`. A duration of 0 teaches nothing."""
        if duration_s <= 0:
            return
        size = plan.size
        if size.num_prompt:
            self.observe_mixed(size.num_tokens, size.num_context, len(plan.work), duration_s, size.num_pairs)
        else:
            self.observe_decode(size.num_tokens, size.num_context, len(plan.work), duration_s)

    def observe_decode(self, num_tokens: int, num_context: int, num_seqs: int, duration_s: float) -> None:
        self._decode.observe(num_tokens, num_context, num_seqs, duration_s)
        self.models = StepModels(self._decode.model(), self.models.prompt)

    def observe_mixed(
        self, num_tokens: int, num_context: int, num_seqs: int, duration_s: float, num_pairs: float
    ) -> None:
        """Learn from a step with a piece of a prompt."""
        reads_s = self.models.reads_s(num_tokens, num_context, num_seqs)
        computes_s = self.models.prompt.step_s(num_tokens, num_context, num_seqs, num_pairs)
        share = max(reads_s, computes_s) / duration_s
        if not self._prompt.has_learned:
            self._prompt.assume(duration_s / num_tokens)
            computes_s = 0.0
        near = max(_NEAR, min(_FAR, _ERRORS * self.models.decode.error))
        if duration_s < (1 - near) * reads_s:
            share_read = read_share(self.models.decode.unread_decay, num_tokens)
            self._decode.learn((1.0, num_seqs, num_context, num_seqs, share_read), duration_s)
            self._decode.predicted(reads_s / duration_s)
        if duration_s > (1 + near) * reads_s or duration_s < computes_s:
            self._prompt.learn((1.0, num_tokens, num_context, num_seqs, num_pairs), duration_s, reads_s)
        self._prompt.predicted(share)
        self.models = StepModels(self._decode.model(), self._prompt.model())
