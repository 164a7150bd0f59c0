"""Refuses texts that are far too long before all of them is made tokens, which takes seconds for each megabyte."""

from cluster.ingress.api.generator import ChatTokenizer
from core.errors import RequestError

_CHARACTERS = 8
"""A token has fewer in nearly all texts, so a text with no more than so many for each token of the context is not looked at."""
_CUT_TOKENS = 64
"""What cutting a text in two may add to its tokens, and more."""


def check_length(text: str, field: str, tokenizer: ChatTokenizer, max_context_tokens: int) -> None:
    """Raise RequestError where a long text has more tokens than a context holds, once so many of them are counted."""
    size, num_tokens = _CHARACTERS * max_context_tokens, 0
    if len(text) <= size:
        return
    for start in range(0, len(text), size):
        num_tokens += len(tokenizer.encode(text[start : start + size], add_special_tokens=False))
        if num_tokens > max_context_tokens + _CUT_TOKENS:
            raise RequestError(
                f"this model's context is {max_context_tokens} tokens; the {field} has more, in its first "
                f"{min(len(text), start + size)} of {len(text)} characters already",
                field=field,
                code="context_length_exceeded",
            )
        num_tokens = max(0, num_tokens - _CUT_TOKENS)
