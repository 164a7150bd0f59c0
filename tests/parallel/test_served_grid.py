"""A few of the servers of `served_grid.py`, which its `main` tries all of; and what a group of ranks has no room for."""

from itertools import chain
from pathlib import Path

import openai
import pytest

from core.config.cluster_config import load
from models.text.tokenizer import load_tokenizer
from parallel.mesh import Mesh
from tests.models.checkpoints import DENSE, HYBRID, SPARSE, UNSTAGED
from tests.models.served import greedy, make_served_as
from tests.parallel.families import awkward
from tests.parallel.served_grid import (
    EXPERT_MESHES,
    HYBRID_MESHES,
    HYBRID_STAGES,
    LENGTH,
    MESHES,
    UNSTAGED_MESHES,
    Pair,
    ask,
    http_server,
    is_right,
    pairs,
    prepare,
    serve,
    settings,
)


def test_the_grid_has_every_family_on_every_mesh() -> None:
    assert len(set(pairs())) == len(list(pairs()))
    found = list(chain.from_iterable(((p.family, p.prefill), (p.family, p.decode)) for p in pairs()))
    staged = {*HYBRID_MESHES, *chain.from_iterable(HYBRID_STAGES)}
    grids = (DENSE, MESHES), (SPARSE, EXPERT_MESHES), (HYBRID, staged), (UNSTAGED, UNSTAGED_MESHES)
    assert set(found) == {
        (family, mesh) for families, meshes in grids for family in families for mesh in meshes
    }


def smallest(family: str, axis: str) -> Pair:
    """The smallest of a family's servers that have several ranks on `axis`."""
    found = [pair for pair in pairs() if pair.family == family and getattr(pair.decode, axis, 1) > 1]
    return min(found, key=lambda pair: pair.prefill.size + pair.decode.size)


@pytest.mark.slow
@pytest.mark.turns(3)
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("family", "axis"),
    [
        ("gemma2", "tp"),
        ("gemma4", "pp"),
        ("gemma4_small", "tp"),
        ("gpt_oss", "ep"),
        ("qwen2_moe", "pp"),
        ("qwen3_next", "pp"),
        ("granite_hybrid", "tp"),
    ],
)
async def test_answers_over_http_equal_transformers(family: str, axis: str, tmp_path: Path) -> None:
    prompts, want = prepare(family, tmp_path)
    found = await serve(smallest(family, axis), tmp_path, prompts, want)
    assert is_right(found), found


async def test_float16_is_computed_handed_over_and_decoded(tmp_path: Path) -> None:
    """Transformers computes in float32; these answers do not depend on what float16 rounds."""
    prompts, want = prepare("qwen3", tmp_path)
    pair = Pair("qwen3", Mesh(), Mesh())
    async with http_server(settings(tmp_path, pair, **{"model.dtype": "float16"})) as (cluster, client):
        model = (await client.models.list()).data[0].id
        assert [await ask(client, model, prompt) for prompt in prompts] == want
        assert sum(instance.work_counts().grants for instance in cluster.instances) >= len(prompts)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("forked")
async def test_what_fits_the_instance_but_none_of_its_groups_is_refused_at_once(tmp_path: Path) -> None:
    reference, decode = make_served_as(tmp_path, awkward("mixtral")), load_tokenizer(tmp_path).decode
    keys = {"prefill_instances": 0, "decode.dp": 2, "engine.block_size": 4, "engine.num_blocks": 40}
    fits, too_long = list(range(2, 74)), list(range(2, 75))
    async with http_server(load(None, {}, {"model.path": str(tmp_path), **keys})) as (_, client):
        model = (await client.models.list()).data[0].id
        with pytest.raises(openai.BadRequestError, match="81 tokens .* do not fit: .* holds 80 of one"):
            await ask(client, model, too_long)
        assert await ask(client, model, fits) == decode(list(greedy(reference, fits, LENGTH)))
