import random
from collections.abc import Sequence as SeqOf

from core.types import Request, SamplingParams
from engine.planning.sequence import Sequence
from engine.planning.speculation.drafter import Draft, Drafter
from engine.planning.speculation.prompt_lookup import PromptLookup


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


def test_what_followed_the_last_tokens_before_is_proposed_again() -> None:
    draft = drafted(PromptLookup(), sequence([9, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]))
    assert draft is not None
    assert (draft.tokens, draft.match) == ((4, 5, 6, 7), 3)


def test_what_goes_round_is_taken_to_go_on_so() -> None:
    draft = drafted(PromptLookup(), sequence([9, 1, 2, 1, 2, 1, 2]), most=5)
    assert draft is not None
    assert draft.tokens == (1, 2, 1, 2, 1)


def test_nothing_is_proposed_where_nothing_repeats_itself() -> None:
    assert drafted(PromptLookup(), sequence(range(50))) is None


def test_a_prompt_longer_than_what_is_remembered_is_read_from_its_end() -> None:
    part = random.Random(1).sample(range(1000), 40)
    draft = drafted(PromptLookup(), sequence([*range(2000, 42_000), *part, 5, *part]))
    assert draft is not None
    assert draft.tokens[0] == 5
