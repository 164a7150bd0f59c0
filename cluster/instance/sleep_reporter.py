"""Says to every scheduler, also to those that come later, that an instance sleeps."""

from core.config.cluster_config import ClusterConfig
from core.ports import Clock, Mail, Resolve
from core.sleep_messages import Asleep
from net.schedulers import Schedulers


class SleepReporter:
    """While `run` runs. An instance that serves speaks for itself (`reporting.Reporter`): then there is nothing to say here."""

    def __init__(
        self, config: ClusterConfig, mail: Mail, clock: Clock, resolve: Resolve, num_spares: int
    ) -> None:
        self._mail = mail
        self.said: Asleep | None = None
        """What is so now; None while the instance serves."""
        self._schedulers = Schedulers(
            resolve, config.serve.schedulers, clock, self._found, num_spares=num_spares
        )

    @property
    def is_known(self) -> bool:
        """Whether some scheduler was told."""
        return self.said is not None and bool(self._schedulers.living)

    async def run(self) -> None:
        await self._schedulers.run()

    def say(self, asleep: Asleep) -> None:
        self.said = asleep
        for scheduler in self._schedulers.living:
            self._mail.send(scheduler, asleep)

    def forget(self) -> None:
        """The instance serves again."""
        self.said = None

    def lost(self, peer: str) -> None:
        self._schedulers.lose(peer)

    def _found(self, scheduler: str) -> None:
        if self.said is not None:
            self._mail.send(scheduler, self.said)
