"""Models on Ray that share processes and memory: each answers as it does alone, and what dies is replaced without a lost request."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from core.config.cluster_config import load
from tests.cluster.test_local_models import checkpoint, served
from tests.e2e.cluster_process import serving
from tests.e2e.test_many_models_on_ray import answers

pytestmark = [pytest.mark.slow, pytest.mark.turns(6, number=3)]
_MANY = 100
FAMILIES = ("llama", "qwen3")


def configured(models: dict[str, Any], tp: int, *, shared: bool) -> dict[str, Any]:
    alone = {"models": models, "prefill_instances": 0, "engine": {"num_blocks": 64}, "decode": {"tp": tp}}
    if not shared:
        return alone
    group = {"mode": "on_demand", "group": "card", "level": 2, "least_awake_s": 0.2}
    return alone | {
        "residency_groups": {"card": {"awake_models": 1}},
        "schedule": {"residency": group},
        "mail": {"peer_timeout_s": 60},  # nobody is stopped: who is silent waits for a processor
    }


@pytest.mark.parametrize("tp", [1, 2])
async def test_models_that_share_memory_on_ray_take_turns_and_outlive_what_dies(
    tmp_path: Path, tp: int
) -> None:
    models = {"code": {"path": "embedded"}}
    models |= {name: {"path": str(checkpoint(tmp_path / name, name))} for name in FAMILIES}
    async with served(load(configured(models, tp, shared=False), {})) as local:
        want = await local.answers(*models)
    (file := tmp_path / "models.yaml").write_text(yaml.safe_dump(configured(models, tp, shared=True)))
    with serving("--config", str(file), log=tmp_path / "log") as server:
        for _ in range(2):
            assert await answers(server, *models, num_retries=_MANY) == want
        server.replicas("Group-card")[0].kill()
        asked = asyncio.create_task(answers(server, *models, num_retries=_MANY))
        server.replicas("DecodePool-card")[0].kill()
        assert await asked == want
        server.replicas("Scheduler-qwen3")[0].kill()
        assert await answers(server, *models, num_retries=_MANY) == want
        assert len(server.replicas("DecodePool-card")) == 1, "one process has all of them"
