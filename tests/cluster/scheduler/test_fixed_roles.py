"""Placing by targets in a fleet whose instances have one role each."""

from dataclasses import replace

import pytest

from core.cost.steps import StepModel, StepModels
from tests.cluster.scheduler.routing_world import World, instance
from tests.cluster.scheduler.test_slo_policy import STEPS, told, wants

H100 = {"num_blocks": 20_000, "max_batch_tokens": 8192, "max_num_seqs": 256}


def pools(prefills: int = 1, decode_steps: StepModels = STEPS) -> World:
    names = [f"p{i}" for i in range(prefills)]
    world = World(instance("d", "d", **H100), *(instance(name, "p", **H100) for name in names))
    for name in names:
        told(world, name)
    told(world, "d", steps=decode_steps)
    return world


def test_a_prefill_instance_that_stands_idle_spares_the_one_that_decodes() -> None:
    world = pools()
    assert world.placed(wants("first", 2000)) == "p0>d"
    told(world, "p0", received=("first#0",))
    told(world, "d", received=("first#0",), num_running=1, num_decoding=1)
    assert world.placed(wants("next", 2000)) == "p0>d"


def test_decode_computes_a_prompt_whose_target_the_prefill_queue_would_miss() -> None:
    world = pools()
    told(world, "p0", waiting_tokens=60_000)
    assert world.placed(wants("r", 4000, ttft_s=1.0)) == "d"


def test_a_prompt_that_is_late_anyway_does_not_hold_up_those_that_decode() -> None:
    world = pools()
    for i in range(8):
        world.placed(wants(f"r{i}", 500))
        told(world, "p0", received=(f"r{i}#0",))
    told(world, "d", num_running=8, num_decoding=8, received=tuple(f"r{i}#0" for i in range(8)))
    told(world, "p0", waiting_tokens=3000, num_running=1)
    assert world.placed(wants("hopeless", 80_000, ttft_s=1.0)) == "p0>d"


@pytest.mark.parametrize("knows", [True, False])
def test_a_decode_instance_that_has_computed_no_prompt_is_taken_to_do_it_as_others_do(knows: bool) -> None:
    """Beside thirty tight sequences a long prompt takes long, as the model of prompt steps says and a mean rate does not."""
    decode_only = STEPS if knows else replace(STEPS, prompt=StepModel())
    world = pools(decode_steps=decode_only)
    for i in range(30):
        world.placed(wants(f"r{i}", 100, tpot_s=0.014))
        told(world, "p0", received=(f"r{i}#0",))
    told(world, "d", steps=decode_only, received=tuple(f"r{i}#0" for i in range(30)), num_decoding=30)
    told(world, "p0", waiting_tokens=3000, num_running=1)
    assert world.placed(wants("long", 16_000, ttft_s=1.0, tpot_s=0.014)) == "p0>d"


def test_of_instances_that_know_nothing_yet_the_emptiest_decodes() -> None:
    world = World(*(instance(name, "d", **H100) for name in "abc"), instance("p", "p", **H100))
    assert {world.placed(wants(f"r{i}", 500)) for i in range(3)} == {"p>a", "p>b", "p>c"}
