"""The merges of vocabularies that a GGUF file has without them, in the order in which they apply."""

from collections.abc import Mapping, Sequence

Pair = tuple[str, str]


def merges_of_ranks(ids: Mapping[str, int]) -> list[Pair]:
    """Return the merges of a vocabulary of tiktoken, whose ids are the ranks."""
    return [pair for pairs in map(_pairs, ids, [ids] * len(ids)) for pair in pairs]


def merges_of_scores(ids: Mapping[str, int], scores: Sequence[float]) -> list[Pair]:
    """Return the merges of a vocabulary of SentencePiece. Those that make a token of a high score come first, and of those the
    ones with a long left part, as in the tokenizer.json that transformers makes."""
    made = [
        ((scores[index], len(left), len(right)), (left, right))
        for text, index in ids.items()
        for left, right in _pairs(text, ids)
    ]
    made.sort(key=lambda each: each[0], reverse=True)
    return [pair for _, pair in made]


def _pairs(text: str, ids: Mapping[str, int]) -> list[Pair]:
    """Return the pairs of tokens that `text` can be made of, those of the smallest ids first."""
    pairs = [(text[:at], text[at:]) for at in range(1, len(text)) if text[:at] in ids and text[at:] in ids]
    return sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
