"""Log-probabilities name each token of a published tokenizer by the text that it has within the answer."""

import random
from typing import Any

import pytest

from cluster.ingress.generation.token_texts import TokenTexts
from tests.world.published_api import NAME, api_of
from tests.world.published_tokenizers import ours
from tests.world.published_tokenizers import theirs as theirs_of

pytestmark = pytest.mark.slow
TOKENIZERS = ("llama2", "gemma3", "qwen3", "gptoss", "deepseek_v3", "llama3_1")
TEXTS = ("Hello wide world", " x  = [1,\n\t2]", "Zürich 水 🙂\ufffd!")


@pytest.mark.parametrize("name", TOKENIZERS)
async def test_the_bytes_of_the_tokens_join_to_the_text(name: str) -> None:
    tokenizer = ours(name)
    for text in TEXTS:
        # As behind a prompt: the first token keeps its space.
        ids = tokenizer.encode("a" + text, add_special_tokens=False)[1:]
        api = api_of(tokenizer, ids)
        chat: Any = await api.openai.completions.create(model=NAME, prompt="a", logprobs=2, max_tokens=99)
        choice = chat.choices[0]
        assert choice.text == tokenizer.decode([*tokenizer.encode("a", add_special_tokens=False), *ids])[1:]
        assert b"".join(data_of(token) for token in choice.logprobs.tokens) == choice.text.encode()
        for token, top in zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, strict=True):
            assert top[token] == -0.5
            assert len(top) == 2


def data_of(token: str) -> bytes:
    """The bytes of a token as OpenAI's completions write it."""
    if not token.startswith("bytes:"):
        return token.encode()
    return bytes.fromhex(token.removeprefix("bytes:").replace("\\x", ""))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_token_has_bytes_and_any_of_them_join_to_a_text(name: str) -> None:
    tokenizer = ours(name)
    texts, before = TokenTexts(tokenizer), tokenizer.encode("a", add_special_tokens=False)
    rng, ids = random.Random(0), sorted(tokenizer.vocabulary.values())
    data = {token: texts.data(token) for token in rng.sample(ids, min(len(ids), 20_000))}
    assert None not in data.values()
    for _ in range(500):
        some = rng.choices(list(data), k=8)
        joined = b"a" + b"".join(data[token] or b"" for token in some)
        text = tokenizer.decode([*before, *some], skip_special_tokens=False)
        assert joined.decode(errors="replace").replace("\ufffd", "") == text.replace("\ufffd", "")


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "deepseek_v3", "llama3_1"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_chats_bytes_join_to_its_content(name: str, stream: bool) -> None:
    tokenizer = ours(name)
    ids = tokenizer.encode("It's 5 °C, 水 🙂 here.", add_special_tokens=False)
    api = api_of(tokenizer, ids)
    asked: Any = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}
    answer: Any = await api.openai.chat.completions.create(model=NAME, stream=stream, **asked)
    if stream:
        choices = [chunk.choices[0] async for chunk in answer]
        content = "".join(choice.delta.content or "" for choice in choices)
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    else:
        content, entries = answer.choices[0].message.content, answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries) == content.encode()
    assert all(entry.token.encode() == bytes(entry.bytes) for entry in entries if "\ufffd" not in entry.token)


async def test_the_first_token_of_all_has_no_space_of_its_own() -> None:
    """Llama 2's decoder drops it, so that the answer's text has none either."""
    tokenizer = ours("llama2")
    for ids in (tokenizer.encode("two words", add_special_tokens=False), [29871, 29871, 1023]):
        api = api_of(tokenizer, ids)
        answer: Any = await api.openai.completions.create(model=NAME, prompt=[1], logprobs=1, max_tokens=99)
        choice = answer.choices[0]
        assert choice.text == tokenizer.decode(ids)
        assert "".join(choice.logprobs.tokens) == choice.text


async def test_two_tokens_of_one_text_are_two_entries() -> None:
    tokenizer = ours("llama2")
    letter, byte = tokenizer.vocabulary["a"], tokenizer.vocabulary["<0x61>"]
    api = api_of(tokenizer, [letter], other=byte)
    answer: Any = await api.openai.completions.create(model=NAME, prompt="x", logprobs=2, max_tokens=1)
    assert answer.choices[0].logprobs.top_logprobs == [{"a": -0.5, f"token_id:{byte}": -1.5}]


@pytest.mark.parametrize("name", TOKENIZERS)
async def test_detokenized_tokens_and_echoed_prompts_are_what_transformers_decodes(name: str) -> None:
    tokenizer, theirs = ours(name), theirs_of(name)
    api = api_of(tokenizer, tokenizer.encode(" x", add_special_tokens=False))
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        found = await api.post("/detokenize", {"tokens": ids})
        assert found.json()["prompt"] == theirs.decode(ids, clean_up_tokenization_spaces=False)
        wish: Any = {"echo": True, "max_tokens": 0, "logprobs": 0, "prompt": ids}
        answer: Any = await api.openai.completions.create(model=NAME, **wish)
        assert answer.choices[0].text == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
