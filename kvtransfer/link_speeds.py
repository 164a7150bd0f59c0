"""What an instance knows of the links to those that it writes to, by holder and transport."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

from core.reports import LinkSpeed
from kvtransfer.link_rate import LinkRate
from kvtransfer.transport.base import Carried

_FORGOTTEN_S = 300.0
"""How long after the last write what was learned of a link counts. Then it is tried again as though it were unknown."""


Ask = Callable[[], Carried | None]


class LinkSpeeds:
    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._rates: dict[tuple[str, str], LinkRate] = {}
        self._asks: dict[tuple[str, str], Ask] = {}

    @contextmanager
    def writing(
        self, holder: str, transport: str, num_bytes: int, ask: Ask = lambda: None
    ) -> Generator[None]:
        """Learn from the write that is made inside, unless it fails. `ask` says what has arrived, where its end does not
        (`Sender.carried`)."""
        began_at, key = self._now(), (holder, transport)
        rate = self._rates.setdefault(key, LinkRate(last_at=began_at))
        write = rate.begin(num_bytes, began_at)
        try:
            yield
        except BaseException:
            rate.drop(write)
            raise
        self._asks[key] = ask
        rate.end(write, self._now(), ask())

    def s_per_byte(self, holder: str, transport: str) -> float:
        """Return 0 where it is not known."""
        rate = self._rates.get((holder, transport))
        return rate.estimate(self._now())[1] if rate else 0.0

    def forget(self, holder: str) -> None:
        for key in [key for key in self._rates if key[0] == holder]:
            del self._rates[key]
            self._asks.pop(key, None)

    def known(self) -> tuple[LinkSpeed, ...]:
        now = self._now()
        for key in [key for key, rate in self._rates.items() if rate.idle_s(now) > _FORGOTTEN_S]:
            del self._rates[key]
            self._asks.pop(key, None)
        for key, ask in self._asks.items():
            if carried := ask():
                self._rates[key].arrived(carried)
        found: list[LinkSpeed] = []
        for (holder, transport), rate in self._rates.items():
            latency_s, s_per_byte = rate.estimate(now)
            if s_per_byte:
                found.append(
                    LinkSpeed(
                        receiver=holder,
                        transport=transport,
                        bytes_per_s=1 / s_per_byte,
                        latency_s=latency_s,
                    )
                )
        return tuple(found)
