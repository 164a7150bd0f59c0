"""Images over HTTP by the SDKs, with prefill and decode apart: what is cached, and what a lost instance costs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import anthropic
import openai
import pytest

from cluster.local import LocalCluster
from core.config.cluster_config import load
from tests.models.seeing_checkpoints import (
    data_url,
    encoded,
    greedy_over,
    make_image,
    make_seeing,
    said,
    shown,
    talks,
)
from tests.parallel.served_grid import http_server
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
KEYS = {
    "engine.block_size": 4,
    "engine.num_blocks": 600,
    "engine.max_batch_tokens": 24,
    "engine.max_num_seqs": 8,
    "schedule.local_threshold_tokens": 0,
}
A, B = make_image(1), make_image(2)
IDS = {"return_token_ids": True}


class Served(NamedTuple):
    cluster: LocalCluster
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic


@asynccontextmanager
async def served(folder: Path, **keys: Any) -> AsyncIterator[Served]:
    config = load({}, {}, {**KEYS, "model.path": str(folder), "model.name": "seeing", **keys})
    async with http_server(config) as (cluster, client):
        root = str(client.base_url.join("/"))
        async with anthropic.AsyncAnthropic(base_url=root, api_key="none", max_retries=0) as theirs:
            yield Served(cluster, client, theirs)


def question(image: Any) -> list[Any]:
    return [{"role": "user", "content": [said("Look at "), shown(image), said(" and say what it is.")]}]


async def test_both_sdks_get_what_transformers_says_and_know_what_was_cached(tmp_path: Path) -> None:
    reference, processor = make_seeing(tmp_path, "llava")
    texts = {
        name: processor.tokenizer.decode(
            greedy_over(reference, processor, question(image), [image], 8), skip_special_tokens=True
        )
        for name, image in (("a", A), ("b", B))
    }
    assert texts["a"] != texts["b"]
    async with served(tmp_path) as here:
        cached: list[int] = []
        for name, image in (("a", A), ("b", B), ("a", A)):
            answer = await here.openai.chat.completions.create(
                model="seeing", messages=question(image), max_tokens=8, temperature=0
            )
            assert answer.choices[0].message.content == texts[name]
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
        before = len(processor.tokenizer.encode("<|user|>\nLook at ", add_special_tokens=False))
        assert cached[0] == 0
        assert cached[1] <= before, "another image's KV is not this one's"
        assert cached[2] > before + 8, "the same image's KV is"
        source: Any = {
            "type": "base64",
            "media_type": "image/jpeg",
            "data": data_url(encoded(B)).partition(",")[2],
        }
        blocks: Any = [said("Look at "), {"type": "image", "source": source}, said(" and say what it is.")]
        async with here.anthropic.messages.stream(
            model="seeing",
            max_tokens=8,
            messages=[{"role": "user", "content": blocks}],
            extra_body={"temperature": 0},
        ) as stream:
            assert await stream.get_final_text() == texts["b"]


@pytest.mark.parametrize(
    ("family", "num_blocks"),
    [("llava_next", 600), ("qwen2_5_vl", 600), ("qwen2_vl", 45), ("gemma3", 45)],
)
async def test_many_at_once_beside_text_alone(family: str, num_blocks: int, tmp_path: Path) -> None:
    """Steps have pieces of several images, and tokens that are decoded. With few blocks, sequences give way and are computed
    again."""
    reference, processor = make_seeing(tmp_path, family)
    asked = talks() * 3
    want = [greedy_over(reference, processor, messages, images, 8) for messages, images in talks()] * 3
    async with served(tmp_path, prefill_instances=0, **{"engine.num_blocks": num_blocks}) as here:
        answers: Any = await asyncio.gather(
            *(
                here.openai.chat.completions.create(
                    model="seeing", messages=messages, max_tokens=8, temperature=0, extra_body=IDS
                )
                for messages, _ in cast(list[Any], asked)
            )
        )
        assert [tuple(answer.choices[0].token_ids) for answer in answers] == want


@pytest.mark.parametrize("family", ["idefics3", "qwen2_5_vl", "gemma3"])
async def test_a_request_goes_on_with_its_image_when_an_instance_is_lost(family: str, tmp_path: Path) -> None:
    """Nothing of the prompt's KV is left: another instance computes it again, image and all."""
    reference, processor = make_seeing(tmp_path, family)
    count = 120
    want = greedy_over(reference, processor, question(A), [A], count)
    async with served(tmp_path, prefill_instances=0, decode_instances=2) as here:
        begun = asyncio.Event()

        async def ask() -> list[int]:
            stream = await here.openai.chat.completions.create(
                model="seeing",
                messages=question(A),
                max_tokens=count,
                temperature=0,
                stream=True,
                extra_body=IDS,
            )
            found: list[int] = []
            async for chunk in stream:
                for choice in chunk.choices:
                    found += getattr(choice, "token_ids", None) or []
                if found:
                    begun.set()
            return found

        running = asyncio.create_task(ask())
        await asyncio.wait_for(begun.wait(), PATIENCE_S)
        serving = next(one for one in here.cluster.instances if one.num_jobs)
        await serving.close()
        assert tuple(await running) == want
