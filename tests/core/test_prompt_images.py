"""Names of an image's tokens."""

from dataclasses import replace

from core.kv import block_hashes
from core.prompt_images import FIRST_ROW, PromptImage
from core.types import Request, SamplingParams

PROMPT = (5, 9, 9, 9, 7, 9, 9, 6)
A = PromptImage(b"a", ((1, 3), (5, 2)))
REQUEST = Request(id="r", prompt=PROMPT, sampling=SamplingParams(), reply_to="", images=(A,))


def test_tokens_of_an_image_are_named_by_what_it_shows_and_text_is_left() -> None:
    named = REQUEST.tokens
    assert [named[at] for at in (0, 4, 7)] == [5, 7, 6]
    rows = [named[at] for at in (1, 2, 3, 5, 6)]
    assert len(set(rows)) == 5
    assert all(FIRST_ROW <= name < 1 << 32 for name in rows), "they must fit what hashes are made of"
    other = replace(REQUEST, images=(replace(A, data=b"b"),)).tokens
    assert not set(rows) & set(other)
    assert REQUEST.tokens == replace(REQUEST, id="again").tokens
    assert REQUEST.prompt == PROMPT


def test_an_image_is_found_again_behind_another_text_of_the_same_length_but_not_as_a_prefix() -> None:
    moved = replace(REQUEST, prompt=(4, *PROMPT[1:])).tokens
    assert moved[1:] == REQUEST.tokens[1:]
    assert block_hashes(moved, 2) != block_hashes(REQUEST.tokens, 2)


def test_output_follows_with_its_own_tokens() -> None:
    assert REQUEST.retry((3, 4)).tokens[-2:] == (3, 4)
