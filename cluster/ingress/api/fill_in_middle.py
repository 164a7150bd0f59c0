"""Prompts for text between a prompt and a suffix, in the form in which a model's family was trained for it.

Forms: StarCoder, Granite and SantaCoder (arXiv:2301.03988), Qwen2.5-Coder and CodeGemma (their model cards), DeepSeek-Coder
(arXiv:2401.14196), Code Llama (arXiv:2308.12950, prefix first), Codestral (mistral-common: suffix first)."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.ingress.api.generator import ChatTokenizer
from core.errors import RequestError


@dataclass(frozen=True, slots=True)
class MiddleMarks:
    before_prefix: str
    before_suffix: str
    before_middle: str
    end: str = ""
    """The token that ends the middle, where that is no end-of-sequence token."""
    suffix_first: bool = False


MARKS: tuple[MiddleMarks, ...] = (
    MiddleMarks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_separator|>"),
    MiddleMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    MiddleMarks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    MiddleMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    MiddleMarks("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),
    MiddleMarks("[PREFIX]", "[SUFFIX]", "", suffix_first=True),
)


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """A prompt. `end` are token ids that end the middle."""

    prompt: tuple[int, ...]
    end: tuple[int, ...]


def fill_in_middle(tokenizer: ChatTokenizer, prefix: str, suffix: str) -> FillInMiddle:
    """Return the tokens that the model is to continue to get what stands between the two. Raises RequestError."""
    for marks in MARKS:
        words = (marks.before_prefix, marks.before_suffix, marks.before_middle)
        if all(word in tokenizer.added_tokens for word in words if word):
            break
    else:
        raise RequestError(
            "suffix: this model's tokenizer has no tokens for text between a prompt and a suffix",
            field="suffix",
        )
    before_prefix, before_suffix, before_middle, end = (
        [tokenizer.added_tokens[word]] if word in tokenizer.added_tokens else []
        for word in (*words, marks.end)
    )
    head = before_prefix + tokenizer.encode(prefix, add_special_tokens=False)
    tail = before_suffix + tokenizer.encode(suffix, add_special_tokens=False)
    parts = tail + head if marks.suffix_first else head + tail
    return FillInMiddle((*_beginning(tokenizer), *parts, *before_middle), tuple(end))


def _beginning(tokenizer: ChatTokenizer) -> Sequence[int]:
    """Return what the tokenizer puts before every text."""
    plain, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    return whole[:at]
