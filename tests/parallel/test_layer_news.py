"""A rank says of a layer that it is in its pool when whoever reads the pool in another process may do so."""

import threading
import time

import pytest

from core.errors import Bug
from core.plan import KVPush, SeqWork, StepPlan
from device.poller import Poller
from device.port import PoolMemory
from device.simulated import SimulatedDevice
from engine.ranks.layer_news import LayerNews
from engine.ranks.rank_messages import LayerReady
from tests.contract.test_broken_waits import Impatient
from tests.contract.test_shared_device import devices, read, shared
from tests.patience import PATIENCE_S

__all__ = ["devices"]
PLAN = StepPlan(
    step=3,
    new=(),
    copies=(),
    drop=(),
    work=(SeqWork(key="a", start=0, count=4, block_ids=(0,), samples=False, push=KVPush("g", 0, 4)),),
)


@pytest.mark.parametrize("poller", [Poller, Impatient])
def test_a_rank_says_of_a_layer_that_it_is_there_when_others_may_read_it(
    poller: type[Poller], devices: tuple[SimulatedDevice, SimulatedDevice]
) -> None:
    here, there = shared(devices)
    said: list[LayerReady] = []
    news = LayerNews(said.append, PoolMemory(devices[0], here, poller()))
    layer_done = news.step_started(PLAN)
    assert layer_done is not None
    devices[0].compute.uses([], [here])
    layer_done(0, 5)
    news.settle(3)
    assert said == [LayerReady(3, 5)]
    if poller is Poller:
        read(devices[1], there)
    else:
        with pytest.raises(Bug, match="behind another process"):
            read(devices[1], there)


class Later:
    """An Event of work that is done when the test says so."""

    is_done = False

    def query(self) -> bool:
        return self.is_done


def test_the_end_of_a_step_waits_for_the_news_of_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    device, events, said, ended = SimulatedDevice(), [Later(), Later()], list[LayerReady](), threading.Event()
    monkeypatch.setattr(device.compute, "record", iter(events).__next__)
    news = LayerNews(said.append, PoolMemory(device, device.allocate(64), Poller()))
    layer_done = news.step_started(PLAN)
    assert layer_done is not None
    layer_done(0, 0)
    layer_done(0, 1)
    thread = threading.Thread(target=lambda: (news.settle(3), ended.set()))
    thread.start()
    assert not said
    events[0].is_done = True
    while not said:
        time.sleep(0.001)
    assert not ended.is_set()
    events[1].is_done = True
    thread.join(PATIENCE_S)
    assert said == [LayerReady(3, 0), LayerReady(3, 1)]
    device.close()
