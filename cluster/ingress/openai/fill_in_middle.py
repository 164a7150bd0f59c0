"""Prompts for text between a prompt and a suffix, in the form in which a model's family was trained for it.

Forms: StarCoder, Granite and SantaCoder (arXiv:2301.03988), Qwen2.5-Coder and CodeGemma (their model cards), DeepSeek-Coder
(arXiv:2401.14196), Code Llama (arXiv:2308.12950, prefix first), Codestral (mistral-common: suffix first)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cluster.ingress.delivery.generator import ChatTokenizer
from core.errors import RequestError


@dataclass(frozen=True, slots=True)
class MiddleMarks:
    before_prefix: str
    before_suffix: str
    before_middle: str
    end: str = ""
    """The token that ends the middle, where that is no end-of-sequence token."""
    suffix_first: bool = False
    repository: str = ""
    """The token before a repository's name, where the family was trained on several files at once."""
    file: str = ""
    """The token before a file's name."""

    @property
    def words(self) -> tuple[str, str, str]:
        return self.before_prefix, self.before_suffix, self.before_middle


MARKS: tuple[MiddleMarks, ...] = (
    MiddleMarks(
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_separator|>"),
        repository="<|repo_name|>",
        file="<|file_sep|>",
    ),
    MiddleMarks(
        *("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), repository="<repo_name>", file="<file_sep>"
    ),
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


def middle_marks(tokenizer: ChatTokenizer) -> MiddleMarks | None:
    """Return the marks that a tokenizer has tokens for; None where its family was not trained for it."""
    known = tokenizer.added_tokens
    return next((marks for marks in MARKS if all(word in known for word in marks.words if word)), None)


def fill_in_middle(
    tokenizer: ChatTokenizer,
    prefix: str,
    suffix: str,
    others: Sequence[tuple[str, str]] = (),
    begun: str = "",
    *,
    field: str = "suffix",
) -> FillInMiddle:
    """Return the tokens that the model is to continue to get what stands between the two. `others` are (name, text) of further
    files, `begun` is the middle's beginning, `field` is the body's field of the suffix. Raises RequestError."""
    if (marks := middle_marks(tokenizer)) is None:
        raise RequestError(
            f"{field}: this model's tokenizer has no tokens for text between a prompt and a suffix",
            field=field,
        )
    before_prefix, before_suffix, before_middle, end = (
        _named(tokenizer, word) for word in (*marks.words, marks.end)
    )
    head = before_prefix + tokenizer.encode(prefix, add_special_tokens=False)
    tail = before_suffix + tokenizer.encode(suffix, add_special_tokens=False)
    parts = tail + head if marks.suffix_first else head + tail
    begin = [*beginning(tokenizer), *_other_files(tokenizer, marks, others)]
    goes_on = tokenizer.encode(begun, add_special_tokens=False) if begun else []
    ends = [*end, *(_named(tokenizer, marks.file) if others else [])]
    return FillInMiddle((*begin, *parts, *before_middle, *goes_on), tuple(ends))


def _other_files(
    tokenizer: ChatTokenizer, marks: MiddleMarks, others: Sequence[tuple[str, str]]
) -> Iterator[int]:
    """Yield the tokens of further files. A family that knows no repositories has their texts before its first mark."""
    repository, file = _named(tokenizer, marks.repository), _named(tokenizer, marks.file)
    if not others:
        return
    if not repository or not file:
        yield from tokenizer.encode("".join(f"{text}\n" for _, text in others), add_special_tokens=False)
        return
    yield from (*repository, *tokenizer.encode("repository\n", add_special_tokens=False))
    for name, text in others:
        yield from (*file, *tokenizer.encode(f"{name or 'file'}\n{text}\n", add_special_tokens=False))
    yield from (*file, *tokenizer.encode("current\n", add_special_tokens=False))


def _named(tokenizer: ChatTokenizer, mark: str) -> list[int]:
    return [tokenizer.added_tokens[mark]] if mark in tokenizer.added_tokens else []


def beginning(tokenizer: ChatTokenizer) -> Sequence[int]:
    """Return what the tokenizer puts before every text."""
    plain, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    return whole[:at]
