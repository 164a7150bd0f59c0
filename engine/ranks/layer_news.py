"""What a rank says to its instance's core.ports.LayerSink: which layers of a step are in its pool and may be read by others.

On a device a layer is launched long before it is there. A thread that asks the device's events says it then, and the thread that
launches goes on. Whoever reads the pool is in another process, which orders its copies behind the message that it gets."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable

from core.plan import StepPlan
from core.ports import DeviceWork, LayerDone
from device.port import PoolMemory
from engine.ranks.rank_messages import LayerReady

Say = Callable[[LayerReady], None]
"""Raises OSError where the instance has ended."""


class LayerNews:
    """core.ports.LayerSink. For the compute thread."""

    def __init__(self, say: Say, memory: PoolMemory | None = None) -> None:
        """`memory` is what the pool lies in. None: the host's, where a layer that is reported is there."""
        self._say, self._memory = say, memory
        self._changed = threading.Condition()
        self._num_owed = Counter[int]()
        """Layers of each step that are launched and not said."""

    def step_started(self, plan: StepPlan) -> LayerDone | None:
        if not any(work.push for work in plan.work):
            return None
        return lambda _, layer, after=None: self._computed(LayerReady(plan.step, layer), after)

    def settle(self, step: int) -> None:
        """Wait until all has been said of the layers of a step that is over. Its end may be said then."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_owed[step])
            del self._num_owed[step]

    def _computed(self, news: LayerReady, after: DeviceWork | None) -> None:
        memory = self._memory
        if memory is None:
            self._say(news)
            return
        with self._changed:
            self._num_owed[news.step] += 1
        event = memory.device.compute.record() if after is None else after
        memory.poller.when_done(event, lambda error: self._over(news, error))

    def _over(self, news: LayerReady, error: Exception | None) -> None:
        try:
            if error is None:  # otherwise the step fails, too
                with contextlib.suppress(OSError):  # the thread that reads from the instance notices its end
                    self._say(news)
        finally:
            with self._changed:
                self._num_owed[news.step] -= 1
                self._changed.notify()
