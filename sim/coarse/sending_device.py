"""A device of the coarse simulation that also reports how fast its link is, and what has left over it, as in production."""

from dataclasses import replace

from core.ports import SchedulerPolicy
from core.reports import LinkSpeed, LoadReport, Register
from kvtransfer.link_rate import LinkRate
from sim.coarse.device import Device, Surroundings
from sim.coarse.device_config import DeviceConfig
from sim.coarse.outlink import Link
from sim.coarse.simulated_sequence import SimulatedSequence


class MeasuredLink:
    """A link that learns from its transfers. sim.coarse.outlink.Link."""

    def __init__(self, cost: Link) -> None:
        self._cost, self._rate = cost, LinkRate()

    def duration_s(self, num_bytes: float) -> float:
        took_s = self._cost.duration_s(num_bytes)
        if num_bytes >= 1:
            self._rate.note(int(num_bytes), took_s)
        return took_s

    def speed(self, receiver: str) -> LinkSpeed:
        """Return what is known once something has been sent."""
        latency_s, s_per_byte = self._rate.estimate(0.0)
        return LinkSpeed(
            receiver=receiver, transport="modelled", bytes_per_s=1 / s_per_byte, latency_s=latency_s
        )


class SendingDevice(Device):
    def __init__(
        self,
        info: Register,
        config: DeviceConfig,
        policy: SchedulerPolicy[SimulatedSequence],
        world: Surroundings,
    ) -> None:
        self._measured = MeasuredLink(config.link)
        super().__init__(info, replace(config, link=self._measured), policy, world)
        self._receivers: dict[str, None] = {}
        self._sent: list[str] = []

    def delivered(self, now: float, seq: SimulatedSequence) -> None:
        super().delivered(now, seq)
        self._sent.append(seq.request.key)
        if seq.holder is not None:
            self._receivers[seq.holder.address] = None

    def withdraw(self, holder: SimulatedSequence) -> bool:
        withdrawn = super().withdraw(holder)
        if withdrawn:
            self._sent.append(holder.request.key)
        return withdrawn

    def report(self, now: float) -> LoadReport | None:
        report = super().report(now)
        if report is None:
            return None
        sent, self._sent = tuple(self._sent), []
        links = tuple(self._measured.speed(receiver) for receiver in self._receivers)
        return replace(report, sent=sent, links=links)
