"""Over the ranks of several meshes, a grammar that is still being compiled holds nobody up, and all ranks sample the same."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.ingress.bodies.structured import schema_grammar
from cluster.local import LocalCluster
from core.errors import RequestError
from core.types import Grammar, SamplingParams
from models.text.tokenizer import load_tokenizer
from tests.models.served import make_served, some_prompts
from tests.parallel.test_served import answer, settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.usefixtures("forked")]
LARGE = schema_grammar(
    {
        "type": "object",
        "properties": {f"p{i}": {"enum": [i, i + 1]} for i in range(1000)},
        "required": ["p0", "p1"],
    }
)
"""Compiling it takes longer than many steps."""
FREE = SamplingParams(seed=3, temperature=1.0, max_tokens=24)
BOUND = replace(FREE, stop_token_ids=(0,), grammar=Grammar(text=LARGE))


async def say(keys: dict[str, int], folder: Path) -> list[list[int]]:
    async with LocalCluster.running(settings(folder, **keys)) as cluster:
        return await said_by(cluster)


async def said_by(cluster: LocalCluster) -> list[list[int]]:
    """What sequences with and without the grammar say together."""
    prompts = [tuple(prompt) for prompt in some_prompts(4, 6)]
    asked = [
        answer(cluster, prompt, replace((FREE, BOUND)[i % 2], seed=i)) for i, prompt in enumerate(prompts)
    ]
    said = list(await asyncio.gather(*asked))
    for instance in cluster.instances:
        instance.check_integrity()
    return said


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("llama", {"prefill.tp": 2, "decode.pp": 2}),
        ("mixtral", {"decode.ep": 3}),
    ],
)
async def test_all_meshes_say_what_one_rank_says(family: str, keys: dict[str, int], tmp_path: Path) -> None:
    make_served(tmp_path, family, 0)
    want = await say({}, tmp_path)
    assert await say(keys, tmp_path) == want
    tokenizer = load_tokenizer(tmp_path)
    assert all(tokenizer.decode(tokens).lstrip().startswith("{") for tokens in want[1::2])


@pytest.mark.parametrize("keys", [{"decode.pp": 2}, {"decode.tp": 2}])
async def test_a_dead_end_is_an_error_on_every_mesh(keys: dict[str, int], tmp_path: Path) -> None:
    make_served(tmp_path, "llama", 0)
    nothing = replace(BOUND, grammar=Grammar(text='start: "yes " X\nX: /b/ & /c/'))
    async with LocalCluster.running(settings(tmp_path, **keys)) as cluster:
        prompt = some_prompts(1, 6)[0]
        with pytest.raises(RequestError, match=r"dead end after \d+ tokens of output"):
            await answer(cluster, tuple(prompt), nothing)
        assert await answer(cluster, tuple(prompt), FREE)
