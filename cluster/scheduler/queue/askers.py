"""The frontends that ask for one and the same request: its client has sent it to several, with one `Idempotency-Key`.

One asks in the others' name: the waiter or the placement has its address. What is decided goes to all of them, and the request is
over when the last one leaves, or one has its last token."""

from collections.abc import Callable, Sequence
from typing import Protocol

from cluster.scheduler.scheduler_events import Send
from core.messages import PlaceReply, Rejected


class AskedFor(Protocol):
    """A waiter or a placement."""

    frontend: str


class Askers:
    def __init__(self, *asked_for: Callable[[str], AskedFor | None]) -> None:
        """Each of `asked_for` returns what there is of a request, by its key."""
        self._asked_for = asked_for
        self._of: dict[str, list[str]] = {}
        """By request, where there are several; the one that asks in all names is the first."""

    def join(self, key: str, first: str, frontend: str) -> None:
        """Note that `frontend` asks for what `first` has asked for."""
        if frontend == first:
            return
        askers = self._of.setdefault(key, [first])
        if frontend not in askers:
            askers.append(frontend)

    def follow(self, key: str, first: str, frontend: str) -> list[str]:
        """Let `first` ask in the name of `frontend` and of those in whose name that has asked. Return all of these."""
        others = [one for one in self._of.get(key, [frontend]) if one != first]
        if others:
            self._of[key] = [first, *others]
        return others

    def leave(self, key: str, frontend: str) -> bool:
        """Let a frontend ask no more. Returns whether others ask for the same."""
        others = [one for one in self._of.get(key, ()) if one != frontend]
        if len(others) > 1:
            self._of[key] = others
        else:
            self.forget(key)
        for asked_for in self._asked_for:
            if others and (asked := asked_for(key)) is not None and asked.frontend == frontend:
                asked.frontend = others[0]
        return bool(others)

    def lose(self, frontend: str) -> None:
        """Let a frontend that is lost ask for nothing that others ask for, too."""
        for key in [key for key, askers in self._of.items() if frontend in askers]:
            self.leave(key, frontend)

    def forget(self, key: str) -> None:
        """Note that a request is over. Idempotent."""
        self._of.pop(key, None)

    def told(self, sends: Sequence[Send]) -> list[Send]:
        """Return `sends`, with what is decided for the one that asks in all names sent to each of them."""
        if not self._of:
            return [*sends]
        found: list[Send] = []
        for send in sends:
            found.append(send)
            if isinstance(message := send.message, PlaceReply | Rejected):
                key = f"{message.request_id}#{message.attempt}"
                first, *others = self._of.get(key, ("",))
                if send.to == first:
                    found += [Send(other, message) for other in others]
                if isinstance(message, Rejected):
                    self.forget(key)
        return found
