"""Rotary position embeddings (Su et al., 2021) and their scalings.

Linear (Chen et al., 2023), Llama 3.1's, YaRN (Peng et al., 2023), and LongRoPE (Ding et al., 2024)."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from core.records import record
from kernels.ops import Ops
from models.spec.model_spec import ModelSpec, QueryTemperature, RopeSpec

_LEAST_POSITIONS, _KEPT_POSITIONS = 1 << 10, 1 << 15
"""How many positions have their cosines and sines kept at first, and at the most: those take 33 MB for heads of 128."""


@record()
class Rotation:
    """What the tokens' positions do to queries and keys."""

    cos: Tensor
    """(T, rotated dimensions)"""
    sin: Tensor
    query_factors: Tensor | None
    """(T, 1, 1), to multiply queries with; None for nothing."""


class Rotations:
    """The rotations of a stage's layers. Layers that rotate alike share one."""

    def __init__(self, spec: ModelSpec, layers: range, ops: Ops, device: torch.device) -> None:
        ropes = [spec.layer_ropes[index] if spec.layer_ropes else spec.rope for index in layers]
        different = [rope for index, rope in enumerate(ropes) if rope not in ropes[:index]]
        self.of_layer = tuple(different.index(rope) for rope in ropes)
        """For each layer, which of the results of a call is its rotation."""
        self._each = [_Angles(spec, rope, ops, device) for rope in different]
        temperature = spec.query_temperature
        everywhere = temperature is not None and temperature.everywhere
        self._temperatures = [
            temperature if everywhere or rope.kind == "none" else None for rope in different
        ]

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> list[Rotation]:
        """(T,), or (3, T) where some of the tokens lie in a plane -> each rotation."""
        found: list[Rotation] = []
        for angles, temperature in zip(self._each, self._temperatures, strict=True):
            cos, sin = angles(positions)
            grown = None if temperature is None else _query_factors(positions, temperature)
            found.append(Rotation(cos.to(dtype), sin.to(dtype), grown))
        return found


class _Angles:
    """Cosines and sines of one kind of rotation, by position. A processor keeps those of positions that have occurred: with few
    rows a look-up takes a quarter of what they take."""

    def __init__(self, spec: ModelSpec, rope: RopeSpec, ops: Ops, device: torch.device) -> None:
        self._ops = ops
        self._frequencies, self._factors = _frequencies(spec, rope, device)
        self._axes = _axes(rope, self._frequencies)
        self._keeps = device.type == "cpu"
        self._cos, self._sin = self._computed(torch.zeros(1, 1, dtype=torch.int64, device=device))
        """(positions, rotated dimensions) float32, at first of position 0 alone"""

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(T,) or (3, T) -> (T, rotated dimensions) each, float32."""
        if positions.ndim != 1:
            return self._computed(positions[self._axes].T)
        if not self._keeps:
            return self._computed(positions[:, None])
        try:
            return self._kept(positions)
        except IndexError:
            most = int(positions.max()) + 1
        if most > _KEPT_POSITIONS:
            return self._computed(positions[:, None])
        self._keep(max(_LEAST_POSITIONS, 1 << (most - 1).bit_length()))
        return self._kept(positions)

    def _kept(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _keep(self, num_positions: int) -> None:
        cos, sin = self._computed(torch.arange(len(self._cos), num_positions)[:, None])
        self._cos, self._sin = torch.cat((self._cos, cos)), torch.cat((self._sin, sin))

    def _computed(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(T, 1), or (T, rotated dimensions) where each frequency has a position of its own."""
        angles = positions.float() * self._frequencies
        cos, sin = (self._ops.by_rows(function, angles) for function in (torch.cos, torch.sin))
        return (cos, sin) if self._factors is None else (cos * self._factors, sin * self._factors)


def _query_factors(positions: Tensor, temperature: QueryTemperature) -> Tensor:
    """(T,) -> (T, 1, 1)."""
    floors = torch.floor((positions.float() + float(temperature.counts_itself)) / temperature.floor_tokens)
    return (torch.log1p(floors) * temperature.scale + 1.0)[:, None, None]


def _frequencies(spec: ModelSpec, rope: RopeSpec, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return frequencies and factors of a head's dimensions, whose halves are alike; None for factors of 1. Dimensions that are
    not rotated have the frequency 0 and the factor 1."""
    rotated = rope.head_dim or spec.rotated_dim
    frequencies, factor = inverse_frequencies(rope, rotated, spec.max_context_tokens)
    rest = (spec.head_dim - spec.rotary_dim) // 2 if spec.rotary_dim else 0
    factors = F.pad(torch.full_like(frequencies, factor), (0, rest), value=1.0).repeat(2).to(device)
    return F.pad(frequencies, (0, rest)).repeat(2).to(device), None if factor == 1.0 else factors


def _axes(rope: RopeSpec, frequencies: Tensor) -> Tensor:
    """Return `RopeSpec.axes`, one for each of `frequencies`. It does not matter which those of the frequency 0 have."""
    axes = torch.zeros(len(frequencies) // 2, dtype=torch.int64)
    axes[: len(rope.axes)] = torch.tensor(rope.axes, dtype=torch.int64)
    return axes.repeat(2).to(frequencies.device)


def rotation_order(spec: ModelSpec) -> Tensor | None:
    """Return (head_dim,) int64: the order in which a head's dimensions are such that its halves are rotated against each other.
    What is rotated as a whole head, by no angle where it is to stay, is then rotated as it should be. None where they are in that
    order. Scores do not change when queries and keys are reordered alike."""
    dim, rotated = spec.head_dim, spec.rotated_dim
    if rotated == dim and not spec.rotates_neighbours:
        return None
    turned, rest = torch.arange(rotated), torch.arange(rotated, dim)
    first, second = (turned[::2], turned[1::2]) if spec.rotates_neighbours else turned.chunk(2)
    middle = len(rest) // 2
    return torch.cat((first, rest[:middle], second, rest[middle:]))


def halves_order(start: int, count: int) -> list[int]:
    """Return rows in an order that puts the first of each neighbouring pair behind `start` into the first half, the second into
    the second: pairs are then where `Ops.rope` rotates them. Scores do not change when queries and keys are reordered alike."""
    end = start + count
    return [*range(start), *range(start, end, 2), *range(start + 1, end, 2)]


def inverse_frequencies(rope: RopeSpec, head_dim: int, max_context_tokens: int) -> tuple[Tensor, float]:
    """(head_dim / 2,) float32, and the factor that cosines and sines are multiplied by. `max_context_tokens`: of the longest
    sequence that is served."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    match rope.kind:
        case "none":
            return torch.zeros_like(plain), 1.0
        case "proportional":  # the first pairs turn as in a head that turns whole, the others do not
            turned = int(rope.parameters.get("partial_rotary_factor", 1.0) * head_dim // 2)
            plain[turned:] = 0.0
            return plain / rope.parameters.get("factor", 1.0), 1.0
        case "linear":
            return plain / rope.parameters["factor"], 1.0
        case "llama3":
            return _llama3(plain, rope), 1.0
        case "yarn":
            return _yarn(plain, rope, head_dim)
        case "longrope":
            return _longrope(plain, rope, max_context_tokens)
        case "default" | "dynamic":  # dynamic scaling begins beyond the contexts that are served
            return plain, 1.0


def _llama3(plain: Tensor, rope: RopeSpec) -> Tensor:
    p = rope.parameters
    factor, low, high = p["factor"], p["low_freq_factor"], p["high_freq_factor"]
    original = p["original_max_position_embeddings"]
    rotations = original * plain / (2 * math.pi)
    keep = ((rotations - low) / (high - low)).clamp(0, 1)
    return plain / factor * (1 - keep) + plain * keep


def _longrope(plain: Tensor, rope: RopeSpec, max_context_tokens: int) -> tuple[Tensor, float]:
    """The factors for long texts are those of all texts, where any may be longer than the texts of the first training: a key that
    is cached cannot change when its text grows."""
    p = rope.parameters
    original, factor = p["original_max_position_embeddings"], p["factor"]
    divisors = torch.tensor(p["long_factor" if max_context_tokens > original else "short_factor"])
    if p.get("attention_factor") is not None:
        return plain / divisors, float(p["attention_factor"])
    return plain / divisors, 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _yarn(plain: Tensor, rope: RopeSpec, head_dim: int) -> tuple[Tensor, float]:
    p = rope.parameters
    original, factor = p["original_max_position_embeddings"], p["factor"]

    def dim_with(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_with(p.get("beta_fast") or 32), dim_with(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp), _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: RopeSpec, factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    p = rope.parameters
    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    if p.get("mscale") and p.get("mscale_all_dim"):
        return magnitude(p["mscale"]) / magnitude(p["mscale_all_dim"])
    return magnitude(1.0)
