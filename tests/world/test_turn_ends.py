"""Published tokenizers say where their models' turns end, also where config.json does not."""

import pytest

from models.text.turn_ends import turn_ends
from tests.world import published_tokenizers
from tests.world.artefacts import artefact


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3", "gemma3", "gptoss", "llama2", "llama3_1"])
def test_the_end_is_the_one_that_transformers_reads(name: str) -> None:
    theirs = published_tokenizers.theirs(name)
    assert turn_ends(artefact(name), len(theirs)) == (theirs.eos_token_id,)
