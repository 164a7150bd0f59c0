"""Published tokenizers load as Baton's own."""

import pytest

from models.text.tokenizer import load_tokenizer
from tests.world.artefacts import artefact

TOKENIZERS = ("qwen3", "deepseek_v3", "gemma3", "gptoss", "llama2", "llama3_1")
TEXT = "Zürich's 3 lakes: 水 🙂\n\tdef f(x): return x"


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_published_tokenizer_gives_back_the_text_that_it_encodes(name: str) -> None:
    tokenizer = load_tokenizer(artefact(name))
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert tokenizer.decode(ids) == TEXT
    assert max(ids) < tokenizer.vocab_size
