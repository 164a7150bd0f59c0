"""The fleets that a plan may consist of: families, each a ladder of sizes in the proportion of what the load takes.

Families: instances of one kind in any role; prefill instances of one kind and decode instances of the same or another; cards that
one of each share; and any role on two kinds of GPUs, where each request is counted to the kind that serves it for less (Mélange,
arXiv 2404.14527). The production scheduler then places requests as it does, not by that count."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, permutations
from math import ceil

from core.errors import ConfigError
from core.types import Slo
from sim.catalogue.catalogue import GPUS, CatalogueModel, num_blocks
from sim.catalogued import Fleet, engines_of
from sim.planning.plan_load import Columns, PeakLoad
from sim.planning.plan_needs import RequestNeeds, request_needs
from sim.shared_cards import possible_shares

MESHES = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2))
"""Tensor-parallel ranks and pipeline stages of an instance; up to a host of eight."""
_LEAST_SHARE = 0.1
"""A kind of GPU on which less of the money is spent is not worth a second kind."""
_GAIN = 0.97
"""A fleet of two kinds is tried where it should cost no more than this much of the best of one kind."""
_MOST_PAIRS, _MOST_SHARED = 4, 2
_LEAST_SCALE = 0.7
"""What the load takes is the least that it could; but a few may miss."""

SHARED = "shared"
"""The role of a card that a prefill and a decode instance share."""
Parts = tuple[Fleet, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """One instance, in any role."""

    instance: Fleet
    needs: RequestNeeds

    @property
    def dollars_per_h(self) -> float:
        return self.instance.dollars_per_h

    @property
    def name(self) -> str:
        one = self.instance
        return " ".join(
            [one.gpu, *(f"{axis}{size}" for axis, size in (("tp", one.tp), ("pp", one.pp)) if size > 1)]
        )


@dataclass(frozen=True, slots=True)
class Part:
    """Instances of one kind in one role, of which the load takes so many."""

    kind: Kind
    role: str
    need: float

    @property
    def num_instances(self) -> int:
        """The number of instances that the part grows by."""
        return 2 if self.role == SHARED else 1

    def fleet(self, count: int) -> Fleet:
        if self.role == SHARED:
            return self.kind.instance.resized(count)
        counts = {"num_prefill": 0, "num_decode": 0, "num_both": 0, f"num_{self.role}": count}
        return replace(self.kind.instance, **counts)


@dataclass(frozen=True, slots=True)
class Rung:
    """A size: so many times what the load takes by estimate."""

    scale: float
    parts: Parts

    @property
    def dollars_per_h(self) -> float:
        return dollars_per_h(self.parts)


def dollars_per_h(parts: Parts) -> float:
    return sum(part.dollars_per_h for part in parts)


def num_instances(parts: Parts) -> int:
    return sum(part.num_instances for part in parts)


def name_of(parts: Parts) -> str:
    return " + ".join(f"{count} {kind}" for count, kind in _counted(parts))


def kind_of(parts: Parts) -> str:
    """Return the name without its numbers."""
    return " + ".join(kind for _, kind in _counted(parts))


def _counted(parts: Parts) -> Iterator[tuple[int, str]]:
    for part in parts:
        sizes = [f"{name}{size}" for name, size in (("tp", part.tp), ("pp", part.pp)) if size > 1]
        group = " ".join([part.gpu, *sizes])
        if part.shares is not None:
            yield part.num_units, f"{group} shared by {part.shares}"
            continue
        counts = ((part.num_prefill, "prefill"), (part.num_decode, "decode"), (part.num_both, "any role"))
        yield from ((count, f"{group} {role}") for count, role in counts if count)


@dataclass(frozen=True, slots=True)
class Family:
    """Fleets of the same parts. `rungs` grow in scale and in price."""

    parts: tuple[Part, ...]
    rungs: tuple[Rung, ...]

    @property
    def name(self) -> str:
        return name_of(tuple(part.fleet(1) for part in self.parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What fleets may be made of, and for which model."""

    model: str
    gpus: Sequence[str] = tuple(GPUS)
    prices: Mapping[str, float] = field(default_factory=dict[str, float])
    """Dollars an hour, in place of the catalogue's."""
    read: CatalogueModel | None = None
    """A model that the catalogue does not have, called `model`."""

    def instances(self, block_tokens: int) -> list[Fleet]:
        """Return one instance of each kind that the model fits, the cheapest first. Raises ConfigError where it fits none."""
        found: list[Fleet] = []
        for gpu in self.gpus:
            priced = replace(GPUS[gpu], dollars_per_h=self.prices.get(gpu, GPUS[gpu].dollars_per_h))
            one = Fleet(
                gpu=gpu,
                model=self.model,
                num_prefill=0,
                num_decode=0,
                num_both=1,
                read=self.read,
                changed=priced,
            )
            found += [replace(one, tp=tp, pp=pp) for tp, pp in MESHES if _fits(one, tp * pp, block_tokens)]
        if not found:
            most = max(tp * pp for tp, pp in MESHES)
            raise ConfigError(f"{self.model} fits no group of up to {most} of {', '.join(self.gpus)}")
        return sorted(found, key=lambda one: one.dollars_per_h)

    def shared(self, block_tokens: int) -> list[Fleet]:
        """Return one card of each kind that has room for a prefill and a decode instance, shared in each way that is tried."""
        whole = [one for one in self.instances(block_tokens) if one.gpus_per_instance == 1]
        pairs = [
            replace(one, num_both=0, num_prefill=1, num_decode=1, shares=shares)
            for one in whole
            for shares in possible_shares(*one.parts)
        ]
        return [one for one in pairs if _both_fit(one, block_tokens)]


def _fits(one: Fleet, num_gpus: int, block_tokens: int, card_share: float = 1.0) -> bool:
    try:
        return num_blocks(*one.parts, block_tokens, num_gpus, card_share) > 0
    except ConfigError:
        return False


def _both_fit(one: Fleet, block_tokens: int) -> bool:
    assert one.shares is not None
    return all(_fits(one, 1, block_tokens, share.memory) for share in (one.shares.prefill, one.shares.decode))


def kinds(instances: Sequence[Fleet], columns: Columns, slo: Slo, block_tokens: int) -> list[Kind]:
    """Return what the requests take of each instance, or of the two on a card."""
    found: list[Kind] = []
    for one in instances:
        prompts, tokens = engines_of(one, block_tokens)
        found.append(Kind(one, request_needs(columns, slo, prompts, one.pp, tokens)))
    return found


def families(
    all_kinds: Sequence[Kind],
    load: PeakLoad,
    attainment: float,
    copies: float,
    max_instances: int,
    shared: Sequence[Kind] = (),
) -> list[Family]:
    """Return what may serve the load: of instances for which few enough requests are hopeless, of two that together serve
    enough, and of `shared` cards, each kind of them shared in the way that should cost least."""
    per_s, most = copies / load.duration_s, 1 - attainment
    able = [kind for kind in all_kinds if kind.needs.hopeless_share <= most]
    single = [_any_role(kind, per_s) for kind in able]
    least = min((_dollars(parts) for parts in single), default=float("inf"))
    own = [_split(one, one, per_s) for one in able]
    pairs = [_split(one, other, per_s) for one, other in permutations(able, 2)]
    for one, other in combinations(all_kinds, 2):
        if one.instance.gpu != other.instance.gpu:
            pairs += _by_request(one, other, per_s, most)
    mixed = [parts for parts in pairs if _dollars(parts) < _GAIN * least]
    cards: dict[str, tuple[Part, ...]] = {}
    for parts in sorted(
        (_on_cards(kind, per_s) for kind in shared if kind.needs.hopeless_share <= most), key=_dollars
    ):
        cards.setdefault(parts[0].kind.instance.gpu, parts)
    chosen = [
        *single,
        *sorted(own, key=_dollars)[:_MOST_PAIRS],
        *sorted(mixed, key=_dollars)[:_MOST_PAIRS],
        *list(cards.values())[:_MOST_SHARED],
    ]
    return [Family(parts, _rungs(parts, max_instances)) for parts in chosen]


def _dollars(parts: tuple[Part, ...]) -> float:
    """Return what the load should cost an hour, were instances divisible."""
    return sum(part.need * part.kind.dollars_per_h for part in parts)


def _any_role(kind: Kind, per_s: float) -> tuple[Part, ...]:
    needs = kind.needs
    return (Part(kind, "both", per_s * needs.total_s),)


def _on_cards(kind: Kind, per_s: float) -> tuple[Part, ...]:
    """A card has one of each, so there are as many as the busier of the two takes."""
    return (Part(kind, SHARED, per_s * max(kind.needs.total_prompt_s, kind.needs.total_decode_s)),)


def _split(one: Kind, other: Kind, per_s: float) -> tuple[Part, ...]:
    return (
        Part(one, "prefill", per_s * one.needs.total_prompt_s),
        Part(other, "decode", per_s * other.needs.total_decode_s),
    )


def _by_request(one: Kind, other: Kind, per_s: float, most_hopeless: float) -> list[tuple[Part, ...]]:
    """Return how much of two kinds the load takes where each request is served by the cheaper that can; nothing where one does
    almost all."""
    if float((one.needs.hopeless & other.needs.hopeless).mean()) > most_hopeless:
        return []
    takes_s = [kind.needs.prompt_s + kind.needs.decode_s for kind in (one, other)]
    cheaper = takes_s[0] * one.dollars_per_h < takes_s[1] * other.dollars_per_h
    by_one = ~one.needs.hopeless & (cheaper | other.needs.hopeless)
    parts = (
        Part(one, "both", per_s * one.needs.of(by_one).total_s),
        Part(other, "both", per_s * other.needs.of(~by_one).total_s),
    )
    shares = [_dollars((part,)) for part in parts]
    return [parts] if min(shares) >= _LEAST_SHARE * sum(shares) else []


def _rungs(parts: tuple[Part, ...], max_instances: int) -> tuple[Rung, ...]:
    needs = [max(part.need, 1e-6) for part in parts]
    scales = sorted({count / need for need in needs for count in range(1, max_instances + 1)})
    rungs: dict[tuple[int, ...], Rung] = {}
    for scale in scales:
        counts = tuple(max(1, ceil(scale * need - 1e-6)) for need in needs)
        if sum(part.num_instances * count for part, count in zip(parts, counts, strict=True)) > max_instances:
            break
        if scale >= _LEAST_SCALE:
            fleets = tuple(part.fleet(count) for part, count in zip(parts, counts, strict=True))
            rungs.setdefault(counts, Rung(scale, fleets))
    return tuple(rungs.values())
