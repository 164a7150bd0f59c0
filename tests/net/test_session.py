"""Sessions over a network that may lose, double and reorder every frame."""

from hypothesis import given
from hypothesis import strategies as st

from net.session import Attach, Session

A, B, C = (bytes([i]) * 16 for i in (1, 2, 3))

Fault = st.sampled_from(["deliver", "drop", "double", "hold"])


def pair() -> tuple[Session, Session]:
    a, b = Session(A), Session(B)
    hello_a, hello_b = a.hello(), b.hello()
    assert b.attach(hello_a) is a.attach(hello_b) is Attach.RESUME
    return a, b


class Wire:
    """From one side to the other; `faults` are used up one a frame, then all is well."""

    def __init__(self, to: Session, faults: list[str]) -> None:
        self.to, self.faults = to, faults
        self.held: list[bytes] = []
        self.got: list[bytes] = []
        self.answers: list[bytes] = []

    def carry(self, frame: bytes) -> None:
        match self.faults.pop() if self.faults else "deliver":
            case "drop":
                return
            case "double":
                self.hand_over(frame)
            case "hold":
                self.held.append(frame)
                return
            case _:
                pass
        self.hand_over(frame)
        held, self.held = self.held, []
        for late in held:
            self.hand_over(late)

    def hand_over(self, frame: bytes) -> None:
        heard = self.to.on_frame(frame)
        self.got += heard.messages
        self.answers += heard.answers


@given(st.lists(Fault, max_size=40), st.lists(Fault, max_size=40), st.integers(0, 20), st.integers(0, 20))
def test_every_message_arrives_once_and_in_order(
    there: list[str], back: list[str], num_a: int, num_b: int
) -> None:
    a, b = pair()
    to_b, to_a = Wire(b, there), Wire(a, back)
    sent_a, sent_b = ([b"%d" % i for i in range(n)] for n in (num_a, num_b))
    for i in range(max(num_a, num_b)):
        if i < num_a:
            to_b.carry(a.stamp(sent_a[i]))
        if i < num_b:
            to_a.carry(b.stamp(sent_b[i]))
    for _ in range(200):  # beats go on until all is well
        to_b.carry(a.beat())
        to_a.carry(b.beat())
        while to_b.answers or to_a.answers:
            answers_b, to_b.answers = to_b.answers, []
            answers_a, to_a.answers = to_a.answers, []
            for frame in answers_b:
                to_a.carry(frame)
            for frame in answers_a:
                to_b.carry(frame)
        if not a.unacked_bytes and not b.unacked_bytes and not there and not back:
            break
    assert to_b.got == sent_a
    assert to_a.got == sent_b
    assert a.unacked_bytes == b.unacked_bytes == 0


def test_a_new_connection_goes_on_where_the_old_one_broke() -> None:
    a, b = pair()
    b.on_frame(a.stamp(b"1"))
    a.stamp(b"2")  # lost with the connection
    assert b.attach(a.hello()) is Attach.RESUME
    assert a.attach(b.hello()) is Attach.RESUME
    assert [m for frame in a.unacknowledged() for m in b.on_frame(frame).messages] == [b"2"]


def test_the_side_that_was_given_up_learns_so_and_the_other_does_not_lose_it_twice() -> None:
    a, _ = pair()
    reborn = Session(C)  # B has given A up
    assert reborn.attach(a.hello()) is Attach.STALE
    assert a.attach(reborn.hello()) is Attach.FORGOTTEN
    fresh = Session(A[::-1][:15] + b"x")
    assert fresh.attach(reborn.hello()) is reborn.attach(fresh.hello()) is Attach.RESUME


def test_bytes_are_counted_until_they_are_acknowledged() -> None:
    a, b = pair()
    for _ in range(3):
        b.on_frame(a.stamp(b"x" * 10))
    assert (b.num_unsaid, b.unsaid_bytes, a.unacked_bytes) == (3, 30, 30)
    a.on_frame(b.beat())
    assert (b.num_unsaid, b.unsaid_bytes, a.unacked_bytes) == (0, 0, 0)
