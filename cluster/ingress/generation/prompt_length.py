"""Refuses texts that are far too long before all of them is made tokens, which takes seconds and 300 MB for each megabyte."""

from cluster.ingress.delivery.generator import ChatTokenizer
from cluster.ingress.tenants.pieces import between_pieces
from core.errors import RequestError

_CHARACTERS = 8
"""A token has fewer in nearly all texts, so a text with no more than so many for each token of the context is not looked at."""
_PIECE_CHARACTERS = 16 << 10
"""The most characters that are counted at a time, in some 4 ms."""
_COUNTED_CHARACTERS = 1 << 20
"""As many are counted for whoever asks for it, also where a context holds less."""
_CUT_TOKENS = 64
"""What cutting a text in two may add to its tokens, and more."""


def check_length(text: str, field: str, tokenizer: ChatTokenizer, max_context_tokens: int) -> None:
    """Raise RequestError where a long text has more tokens than a context holds, once so many of them are counted."""
    unread, num_tokens = _CHARACTERS * max_context_tokens, 0
    if len(text) <= unread:
        return
    size = min(unread, _PIECE_CHARACTERS)
    for start in range(0, len(text), size):
        between_pieces()
        num_tokens += len(tokenizer.encode(text[start : start + size], add_special_tokens=False))
        if num_tokens > max_context_tokens + _CUT_TOKENS:
            why = f"the prompt is too long: at least {num_tokens} tokens > {max_context_tokens} maximum"
            raise beyond_context(why, field, max_context_tokens)
        num_tokens = max(0, num_tokens - _CUT_TOKENS)


def check_counted(text: str, field: str, max_context_tokens: int) -> None:
    """Raise RequestError where a text of which only the tokens are wanted is longer than any prompt."""
    limit = max(_COUNTED_CHARACTERS, _CHARACTERS * max_context_tokens)
    if len(text) > limit:
        why = f"the text has {len(text)} characters, and no more than {limit} are counted: count its parts"
        raise beyond_context(why, field, max_context_tokens)


def beyond_context(why: str, field: str, max_context_tokens: int) -> RequestError:
    """Return the refusal of what the context has no room for. Agents shorten a conversation where an error's text has OpenAI's
    "maximum context length is N tokens" or Anthropic's "prompt is too long: N tokens > M maximum"."""
    return RequestError(
        f"this model's maximum context length is {max_context_tokens} tokens: {why}",
        field=field,
        code="context_length_exceeded",
    )
