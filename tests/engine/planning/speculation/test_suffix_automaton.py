from hypothesis import given
from hypothesis import strategies as st

from engine.planning.speculation.suffix_automaton import SuffixAutomaton, Walk

texts = st.lists(st.integers(0, 3), max_size=60)


def has(text: list[int], part: list[int]) -> bool:
    return any(text[at : at + len(part)] == part for at in range(len(text) - len(part) + 1))


@given(texts)
def test_the_longest_repeated_suffix_is_found_as_the_text_grows(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for end in range(1, len(text) + 1):
        automaton.append(text[end - 1])
        known, before = text[:end], text[: end - 1]
        longest = max(size for size in range(end) if size == 0 or has(before, known[-size:]))
        assert automaton.repeat_length == longest
        if longest:
            assert text[automaton.repeat_end - longest : automaton.repeat_end] == known[-longest:]
            assert automaton.repeat_end < end


@given(texts, texts)
def test_a_walk_finds_the_longest_suffix_that_a_finished_text_has(text: list[int], other: list[int]) -> None:
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    walk = Walk(automaton)
    for end in range(1, len(other) + 1):
        walk.append(other[end - 1])
        known = other[:end]
        assert walk.length == max(size for size in range(end + 1) if size == 0 or has(text, known[-size:]))
        assert text[walk.end - walk.length : walk.end] == (known[-walk.length :] if walk.length else [])


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2)), max_size=120))
def test_what_a_walk_has_found_stays_true_while_the_text_grows(moves: list[tuple[bool, int]]) -> None:
    automaton = SuffixAutomaton()
    walk = Walk(automaton)
    text: list[int] = []
    other: list[int] = []
    for is_text, token in moves:
        (text if is_text else other).append(token)
        (automaton if is_text else walk).append(token)
        if walk.length:
            assert text[walk.end - walk.length : walk.end] == other[-walk.length :]
