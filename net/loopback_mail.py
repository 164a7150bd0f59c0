"""Mail within one process: the executable specification of core.ports.Mail, also under virtual time.

Messages are delivered on a later turn of the event loop, in order for each pair, after an optional modelled latency."""

import asyncio
import itertools
from collections.abc import Callable

from core.messages import Message


class LoopbackNetwork:
    """The peers of one process. `latency_s` delays every message (a modelled network). `prefix`: what addresses have before the
    peer's name, so that those of several networks differ."""

    def __init__(self, latency_s: float = 0.0, prefix: str = "") -> None:
        self._latency_s, self._prefix = latency_s, prefix
        self._peers: dict[str, LoopbackMail] = {}
        self._numbers = itertools.count()

    def join(self, name: str) -> "LoopbackMail":
        mail = LoopbackMail(self, f"loopback:{self._prefix}{name}-{next(self._numbers)}")
        self._peers[mail.address] = mail
        return mail

    def deliver(self, sender: "LoopbackMail", to: str, message: Message) -> None:
        self._later(self._arrive, sender, to, message)

    def leave(self, mail: "LoopbackMail") -> None:
        """Take `mail` away at once, and tell the peers that it has talked to."""
        if self._peers.pop(mail.address, None) is None:
            return
        for address in sorted(mail.contacts):
            if address in self._peers:
                self._later(self._report_lost, address, mail.address)

    def _arrive(self, sender: "LoopbackMail", to: str, message: Message) -> None:
        if sender.address not in self._peers:
            return
        receiver = self._peers.get(to)
        if receiver is None:
            self._report_lost(sender.address, to)
            return
        sender.contacts.add(to)
        receiver.contacts.add(sender.address)
        receiver.on_message(sender.address, message)

    def _report_lost(self, address: str, lost: str) -> None:
        mail = self._peers.get(address)
        if mail is not None:
            mail.contacts.discard(lost)
            mail.on_lost(lost)

    def _later(self, call: Callable[..., None], *args: object) -> None:
        loop = asyncio.get_running_loop()
        if self._latency_s:
            loop.call_later(self._latency_s, call, *args)
        else:
            loop.call_soon(call, *args)


class LoopbackMail:
    """core.ports.Mail on a LoopbackNetwork. `close` is also how a test kills a peer."""

    def __init__(self, network: LoopbackNetwork, address: str) -> None:
        self._network = network
        self.address = address
        self.contacts: set[str] = set()

    def listen(self, on_message: Callable[[str, Message], None], on_lost: Callable[[str], None]) -> None:
        self.on_message, self.on_lost = on_message, on_lost

    def send(self, to: str, message: Message) -> None:
        self._network.deliver(self, to, message)

    async def close(self) -> None:
        self._network.leave(self)
