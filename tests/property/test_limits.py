"""No minute has more than the limit, whoever asks and whatever is given back; and whoever waits as told gets in."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.ingress.tenants.use_limits import go_duration
from core.limit_book import HOLD_S, LEASE_S, LimitBook, SlidingWindow
from core.limit_messages import AskedShare, Limit, SharesTaken, Taken

TOKENS, SEQUENCES = Limit("tenant 'a'", "tokens", 100), Limit("tenant 'a'", "sequences", 10)
steps = st.lists(
    st.tuples(
        st.floats(0, 20, allow_nan=False),
        st.integers(0, 3),
        st.integers(1, 40),
        st.integers(0, 40),
        st.floats(0, HOLD_S),
    ),
    min_size=1,
    max_size=60,
)


def asks(limit: Limit, least: int, wanted: int = 0, taken: tuple[tuple[float, int], ...] = ()) -> AskedShare:
    return AskedShare(taken=Taken(limit, taken), least=least, wanted=wanted)


def most_in_a_minute(uses: list[tuple[float, int]]) -> int:
    return max((sum(n for at, n in uses if first <= at < first + 60.0) for first, _ in uses), default=0)


@settings(max_examples=200, deadline=None)
@given(steps)
def test_what_is_used_in_any_minute_is_within_the_limit(
    events: list[tuple[float, int, int, int, float]],
) -> None:
    """Four ingresses use a part of what they are granted up to `HOLD_S` later, and give the rest back."""
    book, now, uses = LimitBook(), 0.0, list[tuple[float, int]]()
    for gap_s, who, least, ahead, later_s in events:
        now += gap_s
        share = book.ask(f"i{who}", asks(TOKENS, least, least + ahead), now)
        assert share.granted == 0 or least <= share.granted <= least + ahead
        used = min(share.granted, least + ahead // 2)
        uses.append((now + later_s, used))
        now += later_s
        book.ask(f"i{who}", asks(TOKENS, 0, taken=((later_s, used - share.granted),)), now)
    assert most_in_a_minute(uses) <= TOKENS.most


@settings(max_examples=200, deadline=None)
@given(steps)
def test_who_comes_back_as_told_is_let_in(events: list[tuple[float, int, int, int, float]]) -> None:
    book, now = LimitBook(), 0.0
    for gap_s, who, least, overdrawn, _ in events:
        now += gap_s
        share = book.ask(f"i{who}", asks(TOKENS, least), now)
        if not share.granted:
            assert 0 < share.wait_s <= 61
            now += share.wait_s + 1e-6
            assert book.ask("another", asks(TOKENS, least), now).granted == least
        book.ask(f"i{who}", asks(TOKENS, 0, taken=((0.0, overdrawn),)), now)


@settings(max_examples=50, deadline=None)
@given(steps)
def test_a_copy_of_the_book_grants_what_the_book_would(
    events: list[tuple[float, int, int, int, float]],
) -> None:
    book, copy, late, now = LimitBook(), LimitBook(), LimitBook(), 0.0
    for n, (gap_s, who, least, ahead, _) in enumerate(events):
        now += gap_s
        for limit in (TOKENS, SEQUENCES):
            asked = asks(limit, min(least, limit.most), least + ahead)
            share = book.ask(f"i{who}", asked, now)
            copy.note(SharesTaken(f"i{who}", (book.copied(f"i{who}", asked, share, now),)), now)
        if n == len(events) // 2:
            for told in book.whole(now).taken:
                late.note(told, now)
            copy = late
    assert copy.ask("x", asks(TOKENS, 0), now).free == book.ask("x", asks(TOKENS, 0), now).free
    held, copied = (one.ask("x", asks(SEQUENCES, 0), now).free for one in (book, copy))
    assert copied <= held, "what was copied is leased anew"


def test_a_saturated_limit_gives_all_of_it_in_each_minute() -> None:
    window, now, used = SlidingWindow(), 0.0, list[tuple[float, int]]()
    while now < 300.0:
        if not window.wait_s(1, 600, now):
            window.add(1, now)
            used.append((now, 1))
        now += 0.01
    for first in (0, 60, 120, 180):
        assert 0.95 * 600 <= sum(1 for at, _ in used if first <= at < first + 60.0) <= 600


def test_sequences_of_an_ingress_that_is_dead_are_free_again() -> None:
    book = LimitBook()
    assert book.ask("a", asks(SEQUENCES, 8, 8), 0.0).granted == 8
    refused = book.ask("b", asks(SEQUENCES, 3), 0.0)
    assert (refused.granted, refused.free, refused.wait_s) == (0, 2, 1.0)
    book.lose("a")
    assert book.ask("b", asks(SEQUENCES, 3), 0.0).granted == 3
    assert book.ask("c", asks(SEQUENCES, 7), LEASE_S - 1).granted == 7
    assert book.ask("b", asks(SEQUENCES, 0, taken=((0.0, 3),)), LEASE_S - 1).free == 0
    assert book.ask("b", asks(SEQUENCES, 0), LEASE_S).free == 0, "it was heard a moment ago"
    assert book.ask("d", asks(SEQUENCES, 10), 2 * LEASE_S).granted == 10, "nobody was heard for so long"


def test_what_never_fits_is_told_apart() -> None:
    for limit in (TOKENS, SEQUENCES):
        assert LimitBook().ask("a", asks(limit, limit.most + 1), 0.0).wait_s == math.inf


def test_durations_as_openai_writes_them() -> None:
    assert [go_duration(s) for s in (0.0, 0.12, 59.2, 90, 360)] == ["0ms", "120ms", "1m0s", "1m30s", "6m0s"]
