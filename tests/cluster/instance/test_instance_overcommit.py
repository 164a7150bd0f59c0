"""Sequences of a real engine that pause and give up their blocks, against transformers."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from core.types import Slo
from engine.planning.preemption import Preemption
from engine.planning.sequence import Sequence
from tests.cluster.instance import test_instances
from tests.cluster.instance.instance_world import world
from tests.cluster.instance.test_instances import of_transformers, prompts
from tests.patience import PATIENCE_S

reference = test_instances.reference


async def test_sequences_that_pause_for_others_come_back_with_their_kv(
    reference: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are far ahead of a pace of ten seconds per token."""
    folder, model = reference
    batch, num_paused = prompts(16, seed=5, longest=50)[::2], Counter[float]()
    pauses = Preemption.pauses

    def count(preemption: Preemption, seq: Sequence, now: float) -> None:
        num_paused[pause_s] += 1
        pauses(preemption, seq, now)

    monkeypatch.setattr(Preemption, "pauses", count)
    for pause_s in (0.05, 0.0):
        keys = {
            "engine.num_blocks": 40,
            "engine.host_cache_bytes": 1 << 24,
            "engine.longest_pause_s": pause_s,
        }
        async with world(folder, 0, 1, **keys) as w, asyncio.timeout(PATIENCE_S):
            got = await asyncio.gather(*(w.run(p, 60, slo=Slo(tpot_s=10.0)) for p in batch))
            assert got == of_transformers(model, batch, got, 60)
            await w.idle()
            work = (await w.report(w.decodes[0])).work
            assert work.returned > 0
    assert num_paused[0.05] > 0
    assert not num_paused[0.0]
