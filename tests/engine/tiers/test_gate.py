"""What waits for blocks that are being filled, and for how long."""

import threading

import pytest

from core.plan import BlockCopy, SeqWork, StepPlan
from engine.tiers.layer_gate import Fill, GatedSink, LayerGate
from tests.patience import PATIENCE_S


class Told:
    def __init__(self) -> None:
        self.layers: list[int] = []

    def step_started(self, plan: StepPlan):
        return lambda _, layer, after=None: self.layers.append(layer)


def plan(blocks: tuple[int, ...], copies: tuple[BlockCopy, ...] = ()) -> StepPlan:
    return StepPlan(
        step=0,
        new=(),
        copies=copies,
        work=(SeqWork(key="r", start=0, count=1, block_ids=blocks, samples=True),),
        drop=(),
    )


def test_a_layer_is_told_of_when_all_that_it_reads_is_there() -> None:
    gate, told = LayerGate(), Told()
    fill = gate.begin((3, 4))
    done = GatedSink(gate, told).step_started(plan((1, 4)))
    assert done is not None
    fill.done(0)
    done(0, 0)
    waiting = threading.Thread(target=done, args=(0, 1))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    assert told.layers == [0]
    fill.done(1)
    waiting.join(PATIENCE_S)
    assert told.layers == [0, 1]


def test_steps_of_other_blocks_and_later_steps_do_not_wait() -> None:
    gate, told = LayerGate(), Told()
    fill = gate.begin((3, 4))
    sink = GatedSink(gate, told)
    other = sink.step_started(plan((1, 2)))
    fill.end()
    gate.end(fill)
    later = sink.step_started(plan((3, 4)))
    for done in (other, later):
        assert done is not None
        done(0, 0)
    assert told.layers == [0, 0]


def test_a_copied_block_is_waited_for_as_a_whole() -> None:
    gate = LayerGate()
    fill = gate.begin((3,))
    fill.done(0)
    sink, copies = GatedSink(gate, Told()), (BlockCopy(3, 9, 2),)
    waiting = threading.Thread(target=sink.step_started, args=(plan((9,), copies),))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    fill.end()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()


def test_who_waits_for_what_will_not_come_hears_why() -> None:
    fill = Fill((1,), threading.Condition())
    fill.end(OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        fill.wait(0)
