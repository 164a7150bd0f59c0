"""What of a model each rank of a mesh holds, and which meshes are impossible.

Nothing needs to divide anything, except experts: heads, matrices and the vocabulary are cut into parts whose sizes differ by
one at most. With fewer KV heads than tp ranks, neighbouring ranks hold the same KV head and share its query heads; otherwise a
rank holds whole KV heads with all of their query heads. So a rank's query heads are spread evenly over its KV heads."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from core.errors import ConfigError
from parallel.mesh import Mesh

Range = tuple[int, int]
Section = tuple[int, bool]
"""Neighbouring rows of a matrix, and whether ranks have each their part of them; else each has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """Sizes of a model that may be cut."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    """1 where the cache is one latent for all heads; it is whole on every rank."""
    vocab_size: int
    widths: tuple[int, ...]
    """Inner sizes of the dense, expert and shared MLPs that there are."""
    layer_weights: tuple[int, ...]
    """Parameters of each layer."""
    embedding_weights: int
    head_weights: int
    num_experts: int = 0
    convolved: tuple[Section, ...] = ()
    """A recurrent layer's channels, in the checkpoint's order."""
    projected: tuple[Section, ...] = ()
    """What a recurrent layer's first matrix makes, where it makes several things."""
    stage_starts: tuple[int, ...] = ()
    """The layers that a pipeline stage may begin with, where some need what earlier ones keep, choose or make. Empty: any."""

    @property
    def stage_edges(self) -> list[int]:
        """Where the layers may be cut into stages, both ends included."""
        return [*(self.stage_starts or range(self.num_layers)), self.num_layers]


@dataclass(frozen=True, slots=True)
class ModelShare:
    """What one rank holds; ranges are [first, end)."""

    layers: Range
    heads: Range
    kv_heads: Range
    vocab: Range


def even_part(size: int, num_parts: int, index: int) -> Range:
    """Return the `index`-th of parts whose sizes differ by one at most, the larger ones first."""
    base, more = divmod(size, num_parts)
    first = index * base + min(index, more)
    return first, first + base + (index < more)


def part_of(dims: Dims, mesh: Mesh, rank: int) -> ModelShare:
    """Return a rank's share on a mesh that `check` has passed."""
    place = mesh.place(rank)
    heads, kv_heads = _heads(dims, mesh.tp, place.tp)
    return ModelShare(
        stage_layers(dims, mesh.pp)[place.pp],
        heads,
        kv_heads,
        even_part(dims.vocab_size, mesh.tp, place.tp),
    )


def _heads(dims: Dims, tp: int, index: int) -> tuple[Range, Range]:
    repeats = dims.num_heads // dims.num_kv_heads
    if tp <= dims.num_kv_heads:
        first, end = even_part(dims.num_kv_heads, tp, index)
        return (first * repeats, end * repeats), (first, end)
    for kv_head in range(dims.num_kv_heads):
        first, end = even_part(tp, dims.num_kv_heads, kv_head)
        if first <= index < end:
            low, high = even_part(repeats, end - first, index - first)
            return (kv_head * repeats + low, kv_head * repeats + high), (kv_head, kv_head + 1)
    raise AssertionError("every rank has a KV head")


def check(dims: Dims, mesh: Mesh, role: str, num_spare: int = 0) -> None:
    """Raise ConfigError for a mesh that this model cannot fill, with the reason and the nearest one that it can.

    `num_spare` counts slots for experts beyond one for each."""
    reasons: list[str] = []
    nearest = mesh
    most = len(dims.stage_edges) - 1
    if mesh.pp > most:
        why = (
            f": those that need earlier ones let them be cut into {most} at most" if dims.stage_starts else ""
        )
        reasons.append(f"{dims.num_layers} layers cannot fill {mesh.pp} pipeline stages{why}")
        nearest = replace(nearest, pp=most)
    most = min(dims.num_heads, dims.vocab_size, *dims.widths)
    if mesh.tp > most:
        reasons.append(
            f"{dims.num_heads} attention heads over {dims.num_kv_heads} KV heads and matrices of {min(dims.widths)} "
            f"can be cut into at most {most} tensor-parallel parts, not {mesh.tp}"
        )
        nearest = replace(nearest, tp=most)
    ranks = mesh.num_expert_ranks
    if ranks > 1 and not dims.num_experts:
        reasons.append("the model has no experts to spread")
        reasons += ["groups that share nothing are better instances of their own"] if mesh.dp > 1 else []
        nearest = replace(nearest, dp=1, ep=1)
    elif dims.num_experts and not num_spare and dims.num_experts % ranks:
        reasons.append(f"{dims.num_experts} experts cannot be spread evenly over {ranks} ranks")
        dp = _divisor(dims.num_experts, mesh.dp)
        nearest = replace(nearest, dp=dp, ep=_divisor(dims.num_experts // dp, mesh.ep))
    if reasons:
        raise ConfigError(
            f"{role}: {mesh} is impossible for this model: {'; '.join(reasons)}. "
            f"Nearest possible: {role}.tp={nearest.tp}, pp={nearest.pp}, dp={nearest.dp}, ep={nearest.ep}"
        )
    _check_spare(dims.num_experts, mesh.num_expert_ranks, num_spare, role)


def _check_spare(num_experts: int, num_ranks: int, num_spare: int, role: str) -> None:
    """Check that each rank has as many slots, and no rank two of one expert."""
    if not num_spare:
        return
    name = f"{role}.ep_redundant_experts"
    if num_ranks == 1 or not num_experts:
        raise ConfigError(f"{name} needs experts that are spread over ranks ({role}.ep or dp)")
    most = num_experts * (num_ranks - 1)
    possible = [n for n in range(most + 1) if not (num_experts + n) % num_ranks]
    if num_spare not in possible:
        nearest = min(possible, key=lambda n: (abs(n - num_spare), n))
        raise ConfigError(
            f"{name}={num_spare}: {num_experts} experts and their copies must fill {num_ranks} ranks evenly, each with at most "
            f"one of an expert. Nearest possible: {nearest}"
        )


def _divisor(number: int, wanted: int) -> int:
    """Return the divisor nearest to `wanted`; of two equally near ones the larger."""
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: (abs(d - wanted), -d))


def stage_layers(dims: Dims, num_stages: int) -> list[Range]:
    """Return the layers of each stage. The embedding weighs on the first one and the head on the last."""
    weights = list(dims.layer_weights)
    weights[0] += dims.embedding_weights
    weights[-1] += dims.head_weights
    edges = dims.stage_edges
    pieces = [sum(weights[first:end]) for first, end in pairwise(edges)]
    return [(edges[first], edges[end]) for first, end in balanced_cuts(pieces, num_stages)]


def balanced_cuts(weights: Sequence[int], num_parts: int) -> list[Range]:
    """Cut into contiguous parts, none empty, whose heaviest is as light as possible. Among equals the more even cut is preferred.

    This is the linear partition problem, by dynamic programming over prefixes: O(parts x items^2)."""
    total = [0]
    for weight in weights:
        total.append(total[-1] + weight)
    size = len(weights)
    best: list[tuple[int, int]] = [(0, 0)] + [(total[-1] + 1, total[-1] ** 2 + 1)] * size
    cuts: list[list[int]] = []
    for part in range(1, num_parts + 1):
        row: list[tuple[int, int]] = [(total[-1] + 1, total[-1] ** 2 + 1)] * (size + 1)
        cut = [0] * (size + 1)
        for end in range(part, size - (num_parts - part) + 1):
            for start in range(part - 1, end):
                weight = total[end] - total[start]
                cost = max(best[start][0], weight), best[start][1] + weight * weight
                if cost < row[end]:
                    row[end], cut[end] = cost, start
        best, cuts = row, [*cuts, cut]
    parts: list[Range] = []
    end = size
    for cut in reversed(cuts):
        parts.append((cut[end], end))
        end = cut[end]
    return parts[::-1]
