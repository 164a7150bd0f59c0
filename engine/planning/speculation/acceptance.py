"""How likely a draft token is right, learned by its source, its sequence's service class, and how much was found before it."""

from core.types import TokenId

_PRIOR = (0.2, 0.35, 0.5, 0.6, 0.7, 0.8)
"""By `_level`, before anything was seen."""
_PRIOR_WEIGHT = 4.0
_MEMORY = 0.99
"""The share that an observation counts after the next one of its kind."""

_Kind = tuple[str, str, int]


class Acceptance:
    def __init__(self) -> None:
        self._seen: dict[_Kind, tuple[float, float]] = {}
        """The number of right draft tokens and of all, recent ones counting most."""

    def chances(self, source: str, slo: str, match: int, tokens: tuple[TokenId, ...]) -> list[float]:
        """Return for each token of a draft the chance that it and all before it are right. A right token lengthens the match."""
        out: list[float] = []
        so_far = 1.0
        for number in range(len(tokens)):
            so_far *= self._chance((source, slo, _level(match + number)))
            out.append(so_far)
        return out

    def observe(self, source: str, slo: str, match: int, *, proposed: int, right: int) -> None:
        """Learn from one draft. Behind the first wrong token nothing is known."""
        for number in range(min(proposed, right + 1)):
            kind = (source, slo, _level(match + number))
            hits, total = self._seen.get(kind, (0.0, 0.0))
            self._seen[kind] = (_MEMORY * hits + (number < right), _MEMORY * total + 1.0)

    def _chance(self, kind: _Kind) -> float:
        hits, total = self._seen.get(kind, (0.0, 0.0))
        return (hits + _PRIOR_WEIGHT * _PRIOR[kind[2]]) / (total + _PRIOR_WEIGHT)


def _level(match: int) -> int:
    """Return 0 for a match of one token, and one more for each doubling."""
    return min(len(_PRIOR) - 1, max(0, match - 1).bit_length())
