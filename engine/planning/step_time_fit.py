"""Learns how long this instance's steps take, from the steps themselves.

A step with a prompt takes the longer of what it reads and what it computes (`core.steps`). Steps that only decode show what
reading takes. A step that took longer than its reading shows what computing takes; one that took no longer shows only that
computing takes no more, and teaches nothing where that is known.

Each of the two is learned by recursive least squares with forgetting (Haykin, Adaptive Filter Theory, ch. 10), on relative
errors: each equation is divided by its duration, so that a short step counts as much as a long one. Invariant: what `model` gives
has no negative part, and predicts the same for an average step as the raw fit."""

from core.plan import StepPlan
from core.steps import StepModel, StepModels, chunk_pairs

_SCALES = (1.0, 512.0, 65_536.0, 64.0, 4e6)
_NUM = len(_SCALES)
"""Sizes of ordinary features. They scale the features so that none outweighs the others."""
_FORGETTING = 0.995
_PRIOR_VARIANCE = 1.0
"""A coefficient's variance, in seconds^2 per scaled feature, before anything was seen."""
_MAX_VARIANCE = 1e4
"""The largest variance. Where steps are all alike nothing is learned about the directions they do not show, so forgetting
stops."""
_SMOOTHING = 0.05
_TRUSTED_STEPS = 20
_NEAR, _FAR = 0.05, 0.2
"""A step that took no more than a share longer than its reading was not made longer by computing. The share is between these
two: more where predictions of reading are off by more."""
_OUTLIER, _ERRORS, _LEAST = 0.5, 4.0, 0.05
"""A step whose duration is off by more than so many times what steps usually are was disturbed, and teaches no more than this.
The limit is between a twentieth and half of the duration."""


def expected_s(plan: StepPlan, steps: StepModels) -> float:
    """Return how long a step takes by what `steps` say."""
    num_tokens, num_context, num_pairs = _sizes(plan)
    if not _has_prompt(plan):
        return steps.decode.step_s(num_tokens, num_context, len(plan.work))
    return steps.mixed_step_s(num_tokens, num_context, len(plan.work), num_pairs)


def _has_prompt(plan: StepPlan) -> bool:
    return bool(plan.prompt_pieces)


def _sizes(plan: StepPlan) -> tuple[int, int, float]:
    """Return (new tokens, tokens of KV that they follow and they themselves, pairs)."""
    num_context = sum(work.start + work.count for work in plan.work)
    pairs = sum(chunk_pairs(work.start, work.count) for work in plan.prompt_pieces)
    return plan.num_tokens, num_context, pairs


class StepFit:
    """The fit of one plane. `prior` is what a profile says, to begin with."""

    def __init__(self, prior: StepModel | None = None) -> None:
        self._theta = [0.0] * _NUM
        variance = _PRIOR_VARIANCE
        if prior is not None:
            parts = (prior.fixed_s, prior.token_s, prior.context_s, prior.seq_s, prior.pair_s)
            self._theta = [part * scale for part, scale in zip(parts, _SCALES, strict=True)]
            variance = 1e-6
        self._covariance = [[variance * (i == j) for j in range(_NUM)] for i in range(_NUM)]
        self._mean = list(_SCALES)
        self._num_learned = 0 if prior is None else prior.num_steps
        self._num_steps = self._num_learned
        self._error = 0.0 if prior is None else prior.error

    def observe(
        self,
        num_tokens: int,
        num_context_tokens: int,
        num_seqs: int,
        duration_s: float,
        num_pairs: float = 0.0,
    ) -> None:
        """Learn that one step has taken `duration_s` (> 0)."""
        raw = (1.0, num_tokens, num_context_tokens, num_seqs, num_pairs)
        scaled = [value / scale for value, scale in zip(raw, _SCALES, strict=True)]
        share = sum(a * b for a, b in zip(scaled, self._theta, strict=True)) / duration_s
        self.learn(raw, duration_s)
        self.predicted(share)

    def predicted(self, share: float) -> None:
        """Note that a step was seen, and that this share of its duration had been predicted."""
        if self._num_steps:
            self._error += _SMOOTHING * (min(1.0, abs(1.0 - share)) - self._error)
        self._num_steps += 1

    def learn(self, raw: tuple[float, ...], duration_s: float, other_s: float = 0.0) -> None:
        """Learn from a step. `other_s` is what it should have taken by the other plane: only what it took beyond that is new."""
        x = [value / scale / duration_s for value, scale in zip(raw, _SCALES, strict=True)]
        theta, p = self._theta, self._covariance
        residual = 1.0 - sum(a * b for a, b in zip(x, theta, strict=True))
        if self._num_learned > _TRUSTED_STEPS:
            residual = min(residual, 1.0 - other_s / duration_s) if residual > 0 else residual
            limit = min(_OUTLIER, max(_LEAST, _ERRORS * self._error))
            residual = max(-limit, min(limit, residual))
        self._num_learned += 1
        self._mean = [m + _SMOOTHING * (value - m) for m, value in zip(self._mean, raw, strict=True)]
        px = [sum(a * b for a, b in zip(row, x, strict=True)) for row in p]
        forgetting = _FORGETTING if max(p[i][i] for i in range(_NUM)) < _MAX_VARIANCE else 1.0
        gain = 1.0 / (forgetting + sum(a * b for a, b in zip(x, px, strict=True)))
        self._theta = [t + a * gain * residual for t, a in zip(theta, px, strict=True)]
        self._covariance = [
            [(p[i][j] - px[i] * px[j] * gain) / forgetting for j in range(_NUM)] for i in range(_NUM)
        ]

    @property
    def has_learned(self) -> bool:
        return self._num_learned > 0

    def assume(self, token_s: float) -> None:
        """Until something is learned, take a step to be nothing but its tokens, none of which takes longer than `token_s`."""
        scaled, known = token_s * _SCALES[1], self._theta[1]
        self._theta[1] = min(known, scaled) if known else scaled

    def model(self) -> StepModel:
        raw = [t / scale for t, scale in zip(self._theta, _SCALES, strict=True)]
        parts = [max(0.0, part) for part in raw]
        excess = sum((a - b) * m for a, b, m in zip(parts[1:], raw[1:], self._mean[1:], strict=True))
        parts[0] = max(0.0, raw[0] - excess)
        return StepModel(
            fixed_s=parts[0],
            token_s=parts[1],
            context_s=parts[2],
            seq_s=parts[3],
            error=self._error,
            num_steps=self._num_steps,
            pair_s=parts[4],
        )


class StepFits:
    """The fits of both planes of one instance."""

    def __init__(self, prior: StepModels | None = None) -> None:
        prior = prior or StepModels()
        self._decode = StepFit(prior.decode if prior.decode.num_steps else None)
        self._prompt = StepFit(prior.prompt if prior.prompt.num_steps else None)
        self.models = StepModels(self._decode.model(), self._prompt.model())

    def observe(self, plan: StepPlan, duration_s: float) -> None:
        """Learn that `plan` has taken `duration_s`. A duration of 0 teaches nothing."""
        if duration_s <= 0:
            return
        num_tokens, num_context, num_pairs = _sizes(plan)
        if _has_prompt(plan):
            self.observe_mixed(num_tokens, num_context, len(plan.work), duration_s, num_pairs)
        else:
            self.observe_decode(num_tokens, num_context, len(plan.work), duration_s)

    def observe_decode(self, num_tokens: int, num_context: int, num_seqs: int, duration_s: float) -> None:
        self._decode.observe(num_tokens, num_context, num_seqs, duration_s)
        self.models = StepModels(self._decode.model(), self.models.prompt)

    def observe_mixed(
        self, num_tokens: int, num_context: int, num_seqs: int, duration_s: float, num_pairs: float
    ) -> None:
        """Learn from a step with a piece of a prompt."""
        reads_s = self.models.decode.step_s(num_seqs, num_context, num_seqs)
        computes_s = self.models.prompt.step_s(num_tokens, num_context, num_seqs, num_pairs)
        share = max(reads_s, computes_s) / duration_s
        if not self._prompt.has_learned:
            self._prompt.assume(duration_s / num_tokens)
            computes_s = 0.0
        near = max(_NEAR, min(_FAR, _ERRORS * self.models.decode.error))
        if duration_s < (1 - near) * reads_s:
            self._decode.learn((1.0, num_seqs, num_context, num_seqs, 0.0), duration_s)
            self._decode.predicted(reads_s / duration_s)
        if duration_s > (1 + near) * reads_s or duration_s < computes_s:
            self._prompt.learn((1.0, num_tokens, num_context, num_seqs, num_pairs), duration_s, reads_s)
        self._prompt.predicted(share)
        self.models = StepModels(self._decode.model(), self._prompt.model())
