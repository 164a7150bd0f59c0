"""Three models on Ray behind one port: each answers as it does alone, and one's death is no matter to the others."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from core.config.cluster_config import load
from tests.cluster.test_local_models import PROMPTS, checkpoint, served
from tests.e2e.cluster_process import ServeProcess, serving
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.turns(6, number=2)]
_MANY = 100
"""How often a client asks again for a model whose only instance starts."""


async def answers(server: ServeProcess, *models: str, num_retries: int = 0) -> dict[tuple[str, str], str]:
    async with openai.AsyncOpenAI(
        base_url=f"{server.base_url}/v1", api_key="none", max_retries=num_retries, timeout=PATIENCE_S
    ) as client:

        async def one(model: str, prompt: str) -> str:
            answer = await client.completions.create(model=model, prompt=prompt, max_tokens=12, temperature=0)
            return answer.choices[0].text

        asked = [(model, prompt) for model in models for prompt in PROMPTS]
        return dict(zip(asked, await asyncio.gather(*(one(*each) for each in asked)), strict=True))


async def test_three_models_on_ray_answer_as_alone_while_an_instance_of_one_is_killed(tmp_path: Path) -> None:
    content = {
        "models": {
            "code": {"path": "embedded"},
            "org/llama": {"path": str(checkpoint(tmp_path / "llama", "llama"))},
            "qwen3": {"path": str(checkpoint(tmp_path / "qwen3", "qwen3"))},
        },
        "prefill_instances": 0,
        "engine": {"num_blocks": 64},
        "mail": {"peer_timeout_s": 60},  # nobody is stopped: who is silent waits for a processor
    }
    names = list(content["models"])  # type: ignore[arg-type]
    (file := tmp_path / "models.yaml").write_text(yaml.safe_dump(content))
    async with served(load(content, {})) as local:
        want = await local.answers(*names)
    with serving("--config", str(file), log=tmp_path / "log") as server:
        assert await answers(server, *names, num_retries=_MANY) == want
        server.replicas("DecodePool-org-llama")[0].kill()
        others = {key: text for key, text in want.items() if key[0] != "org/llama"}
        for _ in range(3):
            assert await answers(server, "code", "qwen3") == others
        assert others | await answers(server, "org/llama", num_retries=_MANY) == want
        seen = await asyncio.to_thread(_seen, server, "org/llama")
        assert (seen["model"], len(seen["instances"])) == ("org/llama", 1)
        log = (tmp_path / "log").read_text()
        assert all(f"pools of {name}" in log for name in ("code", "org-llama", "qwen3"))


def _seen(server: ServeProcess, model: str) -> dict[str, Any]:
    return httpx.get(f"{server.base_url}/cluster?model={model}", timeout=PATIENCE_S).json()
