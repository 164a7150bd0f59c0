"""What of a real instance outlives its sleep, beside its process and its address."""

import asyncio
from collections.abc import Callable

from cluster.instance.instance_parts import InstanceParts
from core.config.cluster_config import EngineConfig
from core.garbage import collect, give_back_memory
from core.sleep_messages import SleepLevel
from engine.execution.build_group import LoadedModel
from engine.execution.kept_model import KeptModel
from engine.sizing.devices import choose_device, give_back_unused
from engine.sizing.pool_size import PoolSize
from engine.tiers.host_tier import HostTier


class KeptParts:
    """A cluster.instance.instance_parts.SleepingParts. With several ranks no model is kept: they are processes, which
    end as it falls asleep."""

    def __init__(self, engine: EngineConfig, remake: "Callable[[KeptParts], InstanceParts]") -> None:
        """`remake` makes the parts anew, of what is kept."""
        self._engine, self._remake = engine, remake
        self.size: PoolSize | None = None
        """The pool's size, as the first start has found it."""
        self.card = ""
        """The GPU that the instance shares with one of another role."""
        self.model = KeptModel[LoadedModel]()
        self.host_tier: HostTier | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        """The loop that uses the parts, where another thread makes them."""

    def sleep(self, level: SleepLevel, *, keeps_kv: bool) -> SleepLevel:
        if level == 1:
            self.model.rest(choose_device(self._engine.device))
        else:
            self.model.forget()
        if not keeps_kv:
            self.host_tier = None
        collect()  # an instance refers to itself. The imports' objects are left out, so that others wait for milliseconds
        give_back_unused()
        give_back_memory()
        return 1 if self.model.is_kept else 2

    def wake(self, loop: asyncio.AbstractEventLoop) -> InstanceParts:
        self.loop = loop
        return self._remake(self)
