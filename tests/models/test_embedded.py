"""The model that ships with Baton: small enough, loads without complaint, and as good as its card says."""

import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoTokenizer

from models.families.table import read_spec
from models.files.hub import resolve
from models.text.tokenizer import load_tokenizer
from models.text.vocabulary import check_same_vocabulary

ROOT = Path(__file__).parents[2]
FOLDER = resolve("embedded")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train", ROOT / "tools" / "train_embedded.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < 16 << 20


@pytest.mark.parametrize("text", ["def f(x):\n    return x\n", "naïve café 😀 日本語\t\r\n", ""])
def test_the_tokenizer_gives_every_text_back(text: str) -> None:
    tokenizer = load_tokenizer(FOLDER)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokens_become_the_text_that_transformers_makes_of_them() -> None:
    own, theirs = load_tokenizer(FOLDER), AutoTokenizer.from_pretrained(FOLDER)
    ids = [*range(0, 4096, 3), *own.encode("def f(x):\n    return 'naïve — ok' , x !\n")]
    for start in range(0, len(ids), 7):
        for skips in (True, False):
            said = own.decode(ids[start : start + 7], skip_special_tokens=skips)
            wanted = theirs.decode(
                ids[start : start + 7], skip_special_tokens=skips, clean_up_tokenization_spaces=False
            )
            assert said == wanted


def test_the_chat_template_is_what_the_model_was_trained_on(script: ModuleType) -> None:
    tokenizer = load_tokenizer(FOLDER)
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "R"},
    ]
    text = tokenizer.render_chat(messages)
    assert text == "<|system|>\nS\n<|user|>\nQ\n<|assistant|>\nA<|endoftext|><|user|>\nR\n<|assistant|>\n"
    assert (FOLDER / "chat_template.jinja").read_text() == script.CHAT_TEMPLATE


def test_its_draft_model_is_small_and_has_its_vocabulary() -> None:
    draft = resolve("embedded-draft")
    assert sum(path.stat().st_size for path in draft.iterdir()) < 2 << 20
    assert read_spec(draft).vocab_size == read_spec(FOLDER).vocab_size
    check_same_vocabulary(draft, FOLDER, read_spec(draft).vocab_size)


@pytest.mark.slow
def test_its_draft_model_says_what_it_says_as_often_as_is_recorded(script: ModuleType) -> None:
    from transformers import LlamaForCausalLM

    torch.set_num_threads(1)
    folder = resolve("embedded-draft")
    recorded = json.loads((folder / "metrics.json").read_text())["held_out_agreement"]
    tokenizer = load_tokenizer(FOLDER)
    ids = torch.tensor([i for text in script.read_corpus()[1] for i in tokenizer.encode(text)][:4096])
    likeliest = [
        LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)(ids.reshape(-1, 512)).logits.argmax(-1)
        for path in (folder, FOLDER)
    ]
    assert (likeliest[0] == likeliest[1]).float().mean() > recorded * 0.8


@pytest.mark.slow
def test_the_recorded_loss_is_true(script: ModuleType) -> None:
    """On the running interpreter's own held-out files, which differ a little between Python releases."""
    from transformers import LlamaForCausalLM

    torch.set_num_threads(1)
    recorded = json.loads((FOLDER / "metrics.json").read_text())["held_out_bits_per_byte"]
    _, held_out = script.read_corpus()
    held_out = held_out[:6]
    tokenizer = load_tokenizer(FOLDER)
    ids = torch.tensor([i for text in held_out for i in [*tokenizer.encode(text), 0]])
    model = LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    bits = script.bits_per_byte(model, ids[:8000], len(tokenizer.decode(ids[:8000].tolist()).encode()))
    assert bits < recorded * 1.35
    assert bits < math.log2(256) / 4
