"""Tokenising long texts with a published tokenizer, through the API."""

import gc
from dataclasses import replace

import pytest

from tests.cluster.ingress.api.fakes import FakeGenerator
from tests.cluster.ingress.api.harness import SETTINGS, Api
from tests.patience import until
from tests.world.published_tokenizers import ours

pytestmark = pytest.mark.slow


def resident_mib() -> float:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / (1 << 20)


async def test_the_memory_that_long_texts_take_goes_back_to_the_system() -> None:
    tokenizer = ours("qwen3")
    api = Api(FakeGenerator(), replace(SETTINGS, max_context_tokens=131072), tokenizer=tokenizer)  # type: ignore[arg-type]
    text = "a b c d " * (1 << 17)
    assert (await api.post("/tokenize", {"prompt": text[:100_000]})).status_code == 200
    before = resident_mib()
    for _ in range(2):
        answer = await api.post("/tokenize", {"prompt": text})
        assert answer.json()["count"] == 524_289
        del answer
    await until(lambda: resident_mib() - before < 64)
