"""The limits of all ingresses, at one scheduler.

The scheduler that is asked answers from its book, and sends the others a copy of what it has granted. So one that takes another
one's place lacks only what was granted in the moment of its death. A new one answers once it has another one's book."""

from collections.abc import Iterable

from core.limit_book import LimitBook
from core.limit_messages import AskShares, LimitBookCopy, SharesGranted, SharesTaken

SETTLE_S = 2.0
"""How long a new scheduler waits for another one's book. Where it hears of none there is none."""
Word = tuple[str, SharesGranted | SharesTaken | LimitBookCopy]
"""Whom to tell what."""


class LimitKeeper:
    """Feed it messages, with `now` never going back, and send what it returns, in this order."""

    def __init__(self, *, is_alone: bool) -> None:
        """`is_alone`: there are no other schedulers."""
        self._book, self._is_settled = LimitBook(), is_alone
        self._waiting: list[tuple[str, AskShares]] = []

    def on(
        self, sender: str, message: AskShares | SharesTaken | LimitBookCopy, peers: Iterable[str], now: float
    ) -> list[Word]:
        match message:
            case AskShares():
                if self._is_settled:
                    return self._answer(sender, message, peers, now)
                self._waiting.append((sender, message))
            case SharesTaken():
                self._book.note(message, now)
            case LimitBookCopy() if not self._is_settled:
                for told in message.taken:
                    self._book.note(told, now)
                return self.settle(peers, now)
            case LimitBookCopy():
                pass
        return []

    def settle(self, peers: Iterable[str], now: float) -> list[Word]:
        """Answer from now on."""
        self._is_settled = True
        waiting, self._waiting = self._waiting, []
        return [word for sender, asked in waiting for word in self._answer(sender, asked, peers, now)]

    def greet(self, peer: str, now: float) -> list[Word]:
        """Return the book for a scheduler that was just found. One that is not settled has none to give."""
        return [(peer, self._book.whole(now))] if self._is_settled else []

    def lost(self, peer: str) -> None:
        self._book.lose(peer)
        self._waiting = [each for each in self._waiting if each[0] != peer]

    def _answer(self, sender: str, message: AskShares, peers: Iterable[str], now: float) -> list[Word]:
        shares = tuple(self._book.ask(sender, asked, now) for asked in message.asked)
        taken = tuple(
            copied
            for asked, share in zip(message.asked, shares, strict=True)
            if (copied := self._book.copied(sender, asked, share, now)).amounts
        )
        told: list[Word] = [(peer, SharesTaken(sender, taken)) for peer in peers] if taken else []
        return [*told, (sender, SharesGranted(message.nonce, shares))]
