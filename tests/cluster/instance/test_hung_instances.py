"""An instance of one rank whose step does not end: it is lost, and its requests are not."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from core.errors import Hung
from core.messages import Leaving
from core.reports import LoadReport
from tests.cluster.instance.instance_world import world
from tests.cluster.instance.test_instances import (
    of_transformers,
    prompts,
    reference,  # noqa: F401
)
from tests.patience import PATIENCE_S


@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_a_step_that_hangs_costs_its_instance_and_no_token_and_nothing_of_it_is_heard_later(
    reference: tuple[Path, Any],  # noqa: F811
    victim: str,
) -> None:
    folder, model = reference
    async with world(folder, 2, 2, **{"engine.step_grace_s": 1.5}) as w:
        batch = prompts(16, seed=9)
        await asyncio.gather(*(w.run(p, 8) for p in prompts(8, seed=2)))  # so that steps are known
        running = [asyncio.create_task(w.run(p, 40)) for p in batch]
        hung = (w.prefills if victim == "prefill" else w.decodes)[0]
        sink = w.sinks[hung.address]
        sink.goes_on.clear()
        got = await asyncio.gather(*running)
        assert got == of_transformers(model, batch, got, 40)
        assert sink.waits.is_set()
        assert isinstance(hung.failure, Hung)
        assert hung.stuck.is_set(), "its process is to end"
        assert not hung.computes
        assert all(one.computes for one in (*w.prefills, *w.decodes) if one is not hung)
        assert Leaving(hung.address, hung=True) in w.messages
        sink.goes_on.set()
        again = await asyncio.gather(*(w.run(p, 40) for p in batch))
        assert again == got
        await w.kill(hung)
        await w.idle()


async def test_an_instance_computes_from_its_registration_until_its_drain(
    reference: tuple[Path, Any],  # noqa: F811
) -> None:
    async with world(reference[0]) as w:
        [decode] = w.decodes
        known = w.messages  # by the scheduler
        async with asyncio.timeout(PATIENCE_S):
            while not decode.computes:
                assert not any(
                    isinstance(each, LoadReport) and each.address == decode.address for each in known
                )
                await asyncio.sleep(0.001)
        await decode.drain(0.0)
        assert not decode.computes
