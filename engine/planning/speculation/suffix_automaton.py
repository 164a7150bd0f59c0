"""All parts of a growing text of tokens, and where each of them ended last.

Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985), built token by token. A state stands for parts
that end at the same places; its link leads to the longest of their suffixes that ends elsewhere, too. At most two states a
token; their numbers are in arrays, since most states have one successor."""

from array import array

from core.types import TokenId

_NONE = -1
_NO_TOKEN = -(1 << 62)
_MOST_REFRESHED = 16
"""States whose last place is brought up to date with each token: those of its longest repeated suffixes."""


class SuffixAutomaton:
    def __init__(self) -> None:
        self.text = array("q")
        self.repeat_length = 0
        """The length of the longest suffix of the text that occurs earlier in it."""
        self.repeat_end = 0
        """The place where that earlier occurrence ends."""
        self._length, self._link, self._end = array("i", [0]), array("i", [_NONE]), array("i", [0])
        self._token, self._next = array("q", [_NO_TOKEN]), array("i", [_NONE])
        """The first successor of each state."""
        self._others: dict[int, dict[TokenId, int]] = {}
        """The others, where there are any."""
        self._last = 0

    def append(self, token: TokenId) -> None:
        self.text.append(token)
        state = self._add(self._length[self._last] + 1, len(self.text))
        before = self._last
        while before != _NONE and self.successor(before, token) == _NONE:
            self._put(before, token, state)
            before = self._link[before]
        self._link[state] = 0 if before == _NONE else self._split(before, token)
        self._last = state
        self._refresh(self._link[state])

    def successor(self, state: int, token: TokenId) -> int:
        """Return the state behind `token`, or -1 where the parts of `state` are never followed by it."""
        if self._token[state] == token:
            return self._next[state]
        others = self._others.get(state)
        return _NONE if others is None else others.get(token, _NONE)

    def shorter(self, state: int) -> tuple[int, int]:
        """Return the state of the longest suffix that ends at more places, and that suffix' length."""
        link = self._link[state]
        return link, self._length[link]

    def end(self, state: int) -> int:
        """Return a place at which its parts end. For short parts it is a late one."""
        return self._end[state]

    def _add(self, length: int, end: int) -> int:
        self._length.append(length)
        self._link.append(_NONE)
        self._end.append(end)
        self._token.append(_NO_TOKEN)
        self._next.append(_NONE)
        return len(self._length) - 1

    def _put(self, state: int, token: TokenId, target: int) -> None:
        if self._token[state] in (token, _NO_TOKEN):
            self._token[state], self._next[state] = token, target
        else:
            self._others.setdefault(state, {})[token] = target

    def _split(self, before: int, token: TokenId) -> int:
        """Return the state of the longest part of `before` with `token` behind it, made where that part shared another one's."""
        found = self.successor(before, token)
        length = self._length[before] + 1
        if self._length[found] == length:
            return found
        clone = self._add(length, self._end[found])
        self._token[clone], self._next[clone] = self._token[found], self._next[found]
        if found in self._others:
            self._others[clone] = dict(self._others[found])
        self._link[clone] = self._link[found]
        self._link[found] = clone
        while before != _NONE and self.successor(before, token) == found:
            self._put(before, token, clone)
            before = self._link[before]
        return clone

    def _refresh(self, state: int) -> None:
        self.repeat_length, self.repeat_end = self._length[state], self._end[state]
        for _ in range(_MOST_REFRESHED):
            if state <= 0:
                return
            self._end[state] = len(self.text)
            state = self._link[state]


class Walk:
    """The longest suffix of another text that an automaton's text has, as both grow."""

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self.automaton = automaton
        self.length = 0
        self._state = 0

    def append(self, token: TokenId) -> None:
        automaton = self.automaton
        self._settle()
        while self._state and automaton.successor(self._state, token) == _NONE:
            self._state, self.length = automaton.shorter(self._state)
        if (following := automaton.successor(self._state, token)) != _NONE:
            self._state, self.length = following, self.length + 1

    @property
    def end(self) -> int:
        """The place where that suffix ends in the automaton's text."""
        self._settle()
        return self.automaton.end(self._state)

    def _settle(self) -> None:
        """Follow the automaton, which may have given a shorter part a state of its own meanwhile."""
        while self._state:
            link, length = self.automaton.shorter(self._state)
            if self.length > length:
                return
            self._state = link
