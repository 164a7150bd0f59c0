"""The ids of a stream's events. A client that comes back names the last one that it has, and gets those behind it.

Events are counted by choice, since the order in which several choices' tokens come is not the same the next time. An id is
`<answer>:<count>,<count>`, with one count for each choice. What belongs to no choice is counted with the first."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from cluster.ingress.generation.choices import TextPiece
from core.errors import RequestError

_MAX_EVENTS = 1 << 40


class EventNumbers:
    """Give it every event of the stream, also those that the client has."""

    def __init__(self, answer: str, after: Sequence[int], num_choices: int) -> None:
        """`answer` is what the ids begin with; empty: events have none. The client has `after` of each choice's events; empty:
        none. Raises RequestError where the stream has another number of choices."""
        if after and len(after) != num_choices:
            raise RequestError(
                f"Last-Event-ID is of a stream with {len(after)} choices; this request has {num_choices}",
                field="Last-Event-ID",
            )
        self._head = f"id: {answer}:" if answer else ""
        self._after = [*after] or [0] * num_choices
        self._counts = [0] * num_choices

    def numbered(self, choice: int, event: str) -> str:
        """Return a choice's next event with its id; empty where the client has it."""
        counts, after = self._counts, self._after
        counts[choice] += 1
        if counts[choice] <= after[choice]:
            return ""
        if not self._head:
            return event
        if len(counts) == 1:
            return f"{self._head}{counts[0]}\n{event}"
        return f"{self._head}{','.join(map(str, map(max, counts, after)))}\n{event}"

    def in_order(self, pieces: AsyncGenerator[TextPiece, None]) -> AsyncGenerator[TextPiece, None]:
        """Yield first the pieces of whose events the client has some, so that what follows is as it would have been."""
        return self._reordered(pieces) if self._replays and len(self._counts) > 1 else pieces

    async def _reordered(self, pieces: AsyncGenerator[TextPiece, None]) -> AsyncGenerator[TextPiece, None]:
        held: list[TextPiece] = []
        async with aclosing(pieces):
            async for piece in pieces:
                if self._counts[piece.index] >= self._after[piece.index] and self._replays:
                    held.append(piece)
                    continue
                yield piece
                if held and not self._replays:
                    for one in held:
                        yield one
                    held.clear()
        for one in held:
            yield one

    @property
    def has_all(self) -> bool:
        """Whether the client had all events before."""
        return all(count <= after for count, after in zip(self._counts, self._after, strict=True))

    @property
    def _replays(self) -> bool:
        return any(count < after for count, after in zip(self._counts, self._after, strict=True))


def parsed_event_id(text: str) -> tuple[str, tuple[int, ...]]:
    """Return what an event's id begins with, and its counts. Raises RequestError."""
    answer, _, counts = text.strip().partition(":")
    found = counts.split(",")
    if not all(count.isascii() and count.isdigit() and int(count[:20]) < _MAX_EVENTS for count in found):
        raise RequestError(
            f"Last-Event-ID {text[:80]!r} is not the id of an event of this server: send the last `id:` as it came",
            field="Last-Event-ID",
        )
    return answer, tuple(map(int, found))
