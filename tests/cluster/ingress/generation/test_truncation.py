"""Prompts that are cut, against how the tokenizers library cuts a text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from cluster.ingress.generation.truncation import shortened

WORDS = [f"w{i}" for i in range(20)]
VOCABULARY = {word: i for i, word in enumerate([*WORDS, "[CLS]", "[SEP]"])}
TEMPLATES = ["$A", "[CLS] $A", "$A [SEP]", "[CLS] $A [SEP]"]


def tokenizer(template: str) -> Tokenizer:
    made = Tokenizer(WordLevel(VOCABULARY, unk_token="w0"))
    made.pre_tokenizer = WhitespaceSplit()
    special = [(name, VOCABULARY[name]) for name in ("[CLS]", "[SEP]")]
    made.post_processor = TemplateProcessing(single=template, special_tokens=special)
    return made


@pytest.mark.parametrize("template", TEMPLATES)
@given(
    words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=12),
    most=st.integers(3, 14),
    end=st.booleans(),
)
def test_a_text_is_cut_between_what_surrounds_every_text(
    template: str, words: list[str], most: int, end: bool
) -> None:
    made = tokenizer(template)
    whole, around = made.encode(" ".join(words)).ids, made.encode("").ids
    made.enable_truncation(most, direction="left" if end else "right")
    assert list(shortened(tuple(whole), most, around, keep_end=end)) == made.encode(" ".join(words)).ids


def test_what_has_room_for_nothing_of_the_text_is_cut_all_the_same() -> None:
    assert shortened((20, 1, 2, 21), 2, (20, 21), keep_end=True) == (2, 21)
    assert shortened((20, 1, 2, 21), 2, (20, 21), keep_end=False) == (20, 1)
