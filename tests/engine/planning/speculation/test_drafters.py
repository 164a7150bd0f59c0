import random
from collections.abc import Sequence as SeqOf

import pytest

from core.types import Request, SamplingParams
from engine.planning.sequence import Sequence
from engine.planning.speculation.drafter import Draft, Drafter
from engine.planning.speculation.prompt_lookup import PromptLookup
from engine.planning.speculation.suffix_drafter import SuffixDrafter


def sequence(tokens: SeqOf[int], num_prompt: int = 0, name: str = "r", **fields: object) -> Sequence:
    prompt = tuple(tokens[:num_prompt])
    request = Request(id=name, prompt=prompt, sampling=SamplingParams(), reply_to="f", **fields)  # type: ignore[arg-type]
    return Sequence(request=request, tokens=list(tokens), num_prompt=num_prompt, arrival=0)


def drafted(drafter: Drafter, seq: Sequence, most: int = 4, patience: int = 60) -> Draft | None:
    """Once it has read what there is."""
    found: Draft | None = None
    for _ in range(patience):
        found = drafter.draft([seq], most)[0] or found
    return found


@pytest.mark.parametrize("drafter", [PromptLookup(), SuffixDrafter()])
def test_what_followed_the_last_tokens_before_is_guessed_again(drafter: Drafter) -> None:
    draft = drafted(drafter, sequence([9, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]))
    assert draft is not None
    assert (draft.tokens, draft.match) == ((4, 5, 6, 7), 3)


@pytest.mark.parametrize("drafter", [PromptLookup(), SuffixDrafter()])
def test_what_goes_round_is_taken_to_go_on_so(drafter: Drafter) -> None:
    draft = drafted(drafter, sequence([9, 1, 2, 1, 2, 1, 2]), most=5)
    assert draft is not None
    assert draft.tokens == (1, 2, 1, 2, 1)


@pytest.mark.parametrize("drafter", [PromptLookup(), SuffixDrafter()])
def test_nothing_is_guessed_where_nothing_repeats_itself(drafter: Drafter) -> None:
    assert drafted(drafter, sequence(range(50))) is None


@pytest.mark.parametrize("drafter", [PromptLookup(), SuffixDrafter()])
def test_a_prompt_longer_than_what_is_remembered_is_read_from_its_end(drafter: Drafter) -> None:
    part = random.Random(1).sample(range(1000), 40)
    draft = drafted(drafter, sequence([*range(2000, 42_000), *part, 5, *part]))
    assert draft is not None
    assert draft.tokens[0] == 5


def test_the_latest_of_several_continuations_is_guessed() -> None:
    draft = drafted(SuffixDrafter(), sequence([1, 2, 3, 9, 1, 2, 4, 8, 1, 2]))
    assert draft is not None
    assert draft.tokens[0] == 4


def test_a_tenants_past_outputs_are_guessed_again_and_nobody_elses() -> None:
    drafter = SuffixDrafter()
    drafter.left(sequence([7, 1, 2, 3, 4, 5], 1, "first", tenant="a"))
    for fields, found in (
        ({"tenant": "a"}, (4, 5)),
        ({"tenant": "b"}, None),
        ({"tenant": "a", "salt": "s"}, None),
    ):
        draft = drafted(drafter, sequence([8, 9, 1, 2, 3], 2, str(fields), **fields))
        assert (draft and draft.tokens) == found


def test_prompts_and_outputs_that_are_not_to_be_kept_are_not_remembered() -> None:
    drafter = SuffixDrafter()
    drafter.left(sequence([1, 2, 3, 4, 5, 6], 4, "prompt"))
    drafter.left(sequence([7, 1, 2, 3, 4, 5], 1, "private", retain=False))
    assert drafted(drafter, sequence([8, 1, 2, 3], 1, "other")) is None


def test_one_output_does_not_go_on_in_the_next() -> None:
    drafter = SuffixDrafter()
    drafter.left(sequence([1, 2, 3], 0, "one"))
    drafter.left(sequence([4, 5, 6], 0, "two"))
    draft = drafted(drafter, sequence([9, 1, 2], 1, "three"))
    assert draft is not None
    assert draft.tokens == (3,)


def test_old_outputs_make_room_for_new_ones() -> None:
    drafter = SuffixDrafter()
    drafter.left(sequence([1, 2, 3, 4], 0, "old"))
    for number in range(40):
        drafter.left(sequence(range(1000 * number + 10, 1000 * number + 1010), 0, f"{number}"))
        drafted(drafter, sequence([5], name="reads"), patience=2)
    assert drafted(drafter, sequence([0, 1, 2, 3], name="late")) is None
    recent = drafted(drafter, sequence([0, 39_500, 39_501, 39_502], name="recent"))
    assert recent is not None
    assert recent.tokens[0] == 39_503
