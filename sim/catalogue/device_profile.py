"""A step-time model fitted to measured steps, for `core.cost.step_profile`.

Least squares on relative errors, no coefficient negative (the most negative is left out until none is): one fit for steps that
only decode and one for steps with prompts, as in `core.cost.steps`; the latter has a term for attention pairs too, the former
one for the routed experts that are read, where there are any. Errors are those of a fit to every other step on the rest."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy

from core.cost.step_profile import Profile, ProfilePart
from core.cost.steps import StepModel, StepModels, read_share
from core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured step."""

    num_tokens: int
    context_tokens: int
    num_pairs: float
    num_seqs: int
    duration_s: float

    @property
    def decodes_only(self) -> bool:
        return self.num_tokens == self.num_seqs


@dataclass(frozen=True, slots=True)
class ProfiledCost:
    """sim.catalogue.cost.StepModel."""

    models: StepModels
    prompt_pair_s: float

    @property
    def unread_decay(self) -> float:
        return self.models.decode.unread_decay

    def step_s(self, num_tokens: int, context_tokens: int, num_pairs: float, num_seqs: int) -> float:
        if num_tokens == num_seqs:
            return self.models.decode.step_s(num_tokens, context_tokens, num_seqs)
        return (
            self.models.prompt.step_s(num_tokens, context_tokens, num_seqs) + num_pairs * self.prompt_pair_s
        )


def cost_of(profile: Profile) -> ProfiledCost:
    return ProfiledCost(StepModels(profile.decode.model(), profile.prompt.model()), profile.prompt_pair_s)


def fit(samples: Sequence[Sample], decay: float = 0.0) -> ProfiledCost:
    """Fit both models, where experts are routed with this `core.cost.steps.unread_decay`. Raises ConfigError where one of the two
    kinds of steps is missing."""
    parts: dict[bool, tuple[StepModel, float]] = {}
    for decodes in (True, False):
        chosen = [sample for sample in samples if sample.decodes_only == decodes]
        if len(chosen) < 8:
            raise ConfigError(f"{len(chosen)} steps are too few to fit a step-time model to")
        trained = _fit_one(chosen[::2], decay)
        error = fmean(abs(_predict(trained, s, decay) / s.duration_s - 1) for s in chosen[1::2])
        fixed, token, context, seq, last = _fit_one(chosen, decay)
        unread, pair = (last, 0.0) if decodes else (0.0, last)
        parts[decodes] = (
            StepModel(
                fixed_s=fixed + unread,
                token_s=token,
                context_s=context,
                seq_s=seq,
                error=error,
                num_steps=len(chosen),
                unread_s=unread,
                unread_decay=decay if decodes else 0.0,
            ),
            pair,
        )
    return ProfiledCost(StepModels(parts[True][0], parts[False][0]), parts[False][1])


def as_profile(cost: ProfiledCost, **about: Any) -> Profile:
    return Profile(
        decode=ProfilePart(**asdict(cost.models.decode)),
        prompt=ProfilePart(**asdict(cost.models.prompt)),
        prompt_pair_s=cost.prompt_pair_s,
        **about,
    )


def _features(sample: Sample, decay: float) -> tuple[float, ...]:
    """In the order of StepModel's coefficients, then pairs, or in a decode step the share of the experts that is read. Tokens and
    sequences of a decode step are one number."""
    context, seqs = float(sample.context_tokens), float(sample.num_seqs)
    if sample.decodes_only:
        return 1.0, 0.0, context, seqs, read_share(decay, sample.num_tokens)
    return 1.0, float(sample.num_tokens), context, seqs, sample.num_pairs


def _fit_one(samples: Sequence[Sample], decay: float) -> tuple[float, ...]:
    rows = numpy.array([_features(s, decay) for s in samples]) / numpy.array(
        [[s.duration_s] for s in samples]
    )
    scales = numpy.abs(rows).max(axis=0)
    left = [i for i in range(5) if scales[i] > 0]
    while True:
        solved = numpy.linalg.lstsq(rows[:, left] / scales[left], numpy.ones(len(rows)), rcond=None)[0]
        if solved.min() >= 0:
            break
        left.pop(int(solved.argmin()))
    result = [0.0] * 5
    for i, value in zip(left, solved, strict=True):
        result[i] = float(value / scales[i])
    return tuple(result)


def _predict(coefficients: tuple[float, ...], sample: Sample, decay: float) -> float:
    features = _features(sample, decay)
    return sum(a * b for a, b in zip(coefficients, features, strict=True))
