"""Drafts from the longest suffix of a sequence that was seen before: in the sequence itself, or in an output of its tenant.

After SuffixDecoding (Oliaro et al., 2024). Tenants and salts have texts of their own: nobody's guesses, and so nobody's timing,
tell of another's outputs. What is remembered is bounded, and what is read before a step is, too."""

from collections import OrderedDict, deque
from collections.abc import Sequence as SeqOf
from itertools import islice

from core.types import TokenId
from engine.planning.sequence import Sequence
from engine.planning.speculation.drafter import Draft, following
from engine.planning.speculation.suffix_automaton import SuffixAutomaton, Walk

_MOST_OWN = 8_192
"""Tokens of a sequence that are remembered: its last ones, up to twice as many. A token takes some 100 bytes."""
_MOST_PAST = 16_384
"""Tokens of a tenant's outputs in each of two texts; the older one goes when the younger one is full."""
_MOST_TENANTS = 16
_MOST_WAITING = 64
"""Outputs that have ended and are not read yet."""
_CATCH_UP = 512
"""Tokens that are read before one step."""
_LEAST_MATCH = 2
_WALK_BACK = 32
"""Tokens of a sequence that are looked for in a text that is new to it."""

_Owner = tuple[str, str]
"""Tenant and salt."""


class SuffixDrafter:
    """A `Drafter`."""

    def __init__(self) -> None:
        self._own: dict[str, _OwnText] = {}
        self._past: OrderedDict[_Owner, _PastOutputs] = OrderedDict()
        self._ended: deque[tuple[_Owner, tuple[TokenId, ...]]] = deque(maxlen=_MOST_WAITING)

    def draft(self, seqs: SeqOf[Sequence], most: int) -> list[Draft | None]:
        allowance = _CATCH_UP
        out: list[Draft | None] = []
        for seq in seqs:
            own = self._own.get(seq.key)
            if own is None or len(own.automaton.text) > 2 * _MOST_OWN:
                own = self._own[seq.key] = _OwnText(max(0, len(seq.tokens) - _MOST_OWN))
            allowance -= own.read(seq.tokens, allowance)
            out.append(own.draft(self._past.get(_owner(seq)), seq.tokens, most))
        while self._ended and allowance > 0:
            allowance -= self._remember(*self._ended.popleft())
        return out

    def verified(self, seq: Sequence, guessed: int, right: int) -> None:
        """Do nothing: the tokens tell."""

    def left(self, seq: Sequence) -> None:
        self._own.pop(seq.key, None)
        output = tuple(islice(seq.tokens, seq.num_prompt, seq.num_prompt + _MOST_PAST))
        if seq.request.retain and len(output) > _LEAST_MATCH:
            self._ended.append((_owner(seq), output))

    def _remember(self, owner: _Owner, output: tuple[TokenId, ...]) -> int:
        past = self._past.setdefault(owner, _PastOutputs())
        self._past.move_to_end(owner)
        if len(self._past) > _MOST_TENANTS:
            self._past.popitem(last=False)
        past.add(output)
        return len(output)


class _PastOutputs:
    """The outputs of one tenant."""

    def __init__(self) -> None:
        self.texts: tuple[SuffixAutomaton, ...] = (SuffixAutomaton(),)
        """The youngest comes first."""
        self._num_outputs = 0

    def add(self, output: SeqOf[TokenId]) -> None:
        if len(self.texts[0].text) + len(output) > _MOST_PAST:
            self.texts = (SuffixAutomaton(), self.texts[0])
        self._num_outputs += 1
        for token in (*output, -self._num_outputs):  # no part reaches over the end of an output
            self.texts[0].append(token)


class _OwnText:
    """One sequence, and the places of its end in its tenant's outputs."""

    def __init__(self, start: int) -> None:
        self.automaton = SuffixAutomaton()
        self._start = start
        self._walks: list[Walk] = []

    def read(self, tokens: SeqOf[TokenId], most: int) -> int:
        """Read at most `most` tokens. Returns how many were read."""
        at = self._start + len(self.automaton.text)
        found = tokens[at : at + max(0, most)]
        for token in found:
            self.automaton.append(token)
            for walk in self._walks:
                walk.append(token)
        return len(found)

    def draft(self, past: _PastOutputs | None, tokens: SeqOf[TokenId], most: int) -> Draft | None:
        """Return what followed the longest match, of equal ones the sequence's own."""
        if self._start + len(self.automaton.text) < len(tokens):
            return None
        self._follow(past.texts if past is not None else (), tokens)
        length, end, text = self.automaton.repeat_length, self.automaton.repeat_end, self.automaton.text
        source, guess = "own", following
        for walk in self._walks:
            if walk.length > length:
                length, end, text = walk.length, walk.end, walk.automaton.text
                source, guess = "past", _up_to_the_end
        if length < _LEAST_MATCH or not (found := guess(text, end, most)):
            return None
        return Draft(found, source, length)

    def _follow(self, texts: tuple[SuffixAutomaton, ...], tokens: SeqOf[TokenId]) -> None:
        """Look for the end of `tokens` in these texts, and in no others."""
        walks = {id(walk.automaton): walk for walk in self._walks}
        self._walks = [walks.get(id(text)) or _walk(text, tokens) for text in texts]


def _walk(text: SuffixAutomaton, tokens: SeqOf[TokenId]) -> Walk:
    walk = Walk(text)
    for token in tokens[-_WALK_BACK:]:
        walk.append(token)
    return walk


def _up_to_the_end(text: SeqOf[TokenId], end: int, most: int) -> tuple[TokenId, ...]:
    """Return `most` tokens of an output from `end` on, or those that it has."""
    found = tuple(text[end : end + most])
    return next((found[:at] for at, token in enumerate(found) if token < 0), found)


def _owner(seq: Sequence) -> _Owner:
    return seq.request.tenant, seq.request.prefix_salt
