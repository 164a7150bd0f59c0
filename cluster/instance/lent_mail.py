"""A process' mail, lent to the instance that it has just now. An instance that sleeps has given it back."""

from collections.abc import Callable

from core.messages import Message
from core.ports import Mail


class LentMail:
    """A core.ports.Mail. What comes is handed on by `receive` and `lose`, once the borrower listens."""

    def __init__(self, mail: Mail) -> None:
        self._mail, self._is_back = mail, False
        self._on_message: Callable[[str, Message], None] | None = None
        self._on_lost: Callable[[str], None] | None = None

    @property
    def address(self) -> str:
        return self._mail.address

    def listen(self, on_message: Callable[[str, Message], None], on_lost: Callable[[str], None]) -> None:
        self._on_message, self._on_lost = on_message, on_lost

    def send(self, to: str, message: Message) -> None:
        if not self._is_back:
            self._mail.send(to, message)

    async def close(self) -> None:
        """Close the mail, unless it was given back."""
        if not self._is_back:
            await self._mail.close()

    def give_back(self) -> None:
        """The borrower hears and says nothing any more, and can close what is its own."""
        self._is_back = True
        self._on_message = self._on_lost = None

    def receive(self, sender: str, message: Message) -> None:
        if self._on_message is not None:
            self._on_message(sender, message)

    def lose(self, peer: str) -> None:
        if self._on_lost is not None:
            self._on_lost(peer)
