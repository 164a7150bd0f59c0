"""An encoder on Ray: both pools embed, a client notices nothing of an instance's death, and Ray leaves nothing behind."""

import asyncio
from pathlib import Path

import numpy as np
import openai
import pytest

from tests.cluster.ingress.generation.test_encoders import TEXTS, checkpoint
from tests.e2e.cluster_process import ServeProcess, serving

pytestmark = [pytest.mark.slow, pytest.mark.turns(6, number=1)]


async def test_texts_are_embedded_while_an_instance_is_killed(tmp_path: Path) -> None:
    want = checkpoint(tmp_path, "xlm-roberta", "mean").encode(TEXTS, batch_size=1)
    arguments = ("--model", str(tmp_path / "model"), "--prefill", "1", "--decode", "1")
    arguments += ("--set", "mail.peer_timeout_s=60")  # nobody is stopped: who is silent waits for a processor
    with serving(*arguments, log=tmp_path / "log") as server:
        server.wait_status("two instances", lambda status: len(status["instances"]) == 2)
        async with openai.AsyncOpenAI(
            base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:

            async def embedded() -> list[list[float]]:
                got = await client.embeddings.create(model="model", input=TEXTS)
                return [each.embedding for each in got.data]

            running = [asyncio.create_task(embedded()) for _ in range(40)]
            await running[0]
            server.replicas("DecodePool")[0].kill()
            for got in (*await asyncio.gather(*running), await embedded()):
                np.testing.assert_allclose(got, want, atol=1e-5)
        server.wait_status("two instances again", lambda status: len(status["instances"]) == 2)
        assert len(ray_sessions(server)) == 1
        assert server.memory_bytes() < 2e9
    assert ray_sessions(server) == []


def ray_sessions(server: ServeProcess) -> list[Path]:
    """What Ray has left in its temporary folder for this server."""
    return list(Path("/tmp/ray").glob(f"session_*_{server.process.pid}"))
