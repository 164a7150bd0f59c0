"""A step-time model fitted to measured steps, and its file. Pure but for the file.

Least squares on relative errors, no coefficient negative (the most negative is left out until none is): one fit for steps that
only decode and one for steps with prompts, as in `core.steps`; the latter has a term for attention pairs too. Errors are those
of a fit to every other step on the rest."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from core.errors import ConfigError
from core.steps import StepModel, StepModels


@dataclass(frozen=True, slots=True)
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
    """sim.cost.StepModel."""

    models: StepModels
    prompt_pair_s: float

    def step_s(self, num_tokens: int, context_tokens: int, num_pairs: float, num_seqs: int) -> float:
        if num_tokens == num_seqs:
            return self.models.decode.step_s(num_tokens, context_tokens, num_seqs)
        return (
            self.models.prompt.step_s(num_tokens, context_tokens, num_seqs) + num_pairs * self.prompt_pair_s
        )


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")
    fixed_s: float = Field(ge=0)
    token_s: float = Field(ge=0)
    context_s: float = Field(ge=0)
    seq_s: float = Field(ge=0)
    pair_s: float = Field(default=0.0, ge=0)
    error: float = Field(ge=0)
    num_steps: int = Field(ge=1)

    def model(self) -> StepModel:
        return StepModel(**self.model_dump())


class Profile(BaseModel):
    """The file: one machine and model."""

    model_config = ConfigDict(extra="forbid")
    model: str
    machine: str
    decode: _Part
    prompt: _Part
    prompt_pair_s: float = Field(ge=0)
    num_blocks: int = Field(ge=1)
    kv_token_bytes: int = Field(ge=1)
    num_layers: int = Field(ge=1)

    @property
    def cost(self) -> ProfiledCost:
        return ProfiledCost(StepModels(self.decode.model(), self.prompt.model()), self.prompt_pair_s)


def read_profile(path: Path) -> Profile:
    """Raises ConfigError."""
    try:
        return Profile.model_validate_json(path.read_text())
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{path} is no profile of `baton profile`: {str(error).splitlines()[0]}") from None


def fit(samples: Sequence[Sample]) -> ProfiledCost:
    """Raises ConfigError where one of the two kinds of steps is missing."""
    parts: dict[bool, tuple[StepModel, float]] = {}
    for decodes in (True, False):
        chosen = [sample for sample in samples if sample.decodes_only == decodes]
        if len(chosen) < 8:
            raise ConfigError(f"{len(chosen)} steps are too few to fit a step-time model to")
        trained = _fit_one(chosen[::2], decodes)
        error = fmean(abs(_predict(trained, s) / s.duration_s - 1) for s in chosen[1::2])
        fixed, token, context, seq, pair = _fit_one(chosen, decodes)
        parts[decodes] = StepModel(fixed, token, context, seq, error, len(chosen)), pair
    return ProfiledCost(StepModels(parts[True][0], parts[False][0]), parts[False][1])


def as_profile(cost: ProfiledCost, **about: Any) -> Profile:
    return Profile(
        decode=_Part(**asdict(cost.models.decode)),
        prompt=_Part(**asdict(cost.models.prompt)),
        prompt_pair_s=cost.prompt_pair_s,
        **about,
    )


def _features(sample: Sample, decodes: bool) -> tuple[float, ...]:
    """In the order of StepModel's coefficients, then pairs. Tokens and sequences of a decode step are one number."""
    tokens = 0.0 if decodes else float(sample.num_tokens)
    pairs = 0.0 if decodes else sample.num_pairs
    return 1.0, tokens, float(sample.context_tokens), float(sample.num_seqs), pairs


def _fit_one(samples: Sequence[Sample], decodes: bool) -> tuple[float, ...]:
    rows = numpy.array([_features(s, decodes) for s in samples]) / numpy.array(
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


def _predict(coefficients: tuple[float, ...], sample: Sample) -> float:
    features = _features(sample, sample.decodes_only)
    return sum(a * b for a, b in zip(coefficients, features, strict=True))
