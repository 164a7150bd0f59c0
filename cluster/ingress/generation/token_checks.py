"""Refuses tokens that the model has no row for, by their names: a tokenizer may know more tokens than the model it came with."""

from cluster.ingress.delivery.generator import ChatTokenizer
from core.errors import RequestError
from core.request_checks import unknown_token
from core.types import Request, TokenId


def check_tokens(request: Request, prompt_field: str, tokenizer: ChatTokenizer, vocab_size: int) -> None:
    """Raise RequestError where any token of the request is outside the vocabulary. `prompt_field` is the field of the body that
    the prompt was made of."""
    if (found := unknown_token(request, vocab_size)) is not None:
        field = prompt_field if found.part == "prompt" else found.part
        raise _refusal(found.token, field, tokenizer, vocab_size)


def check_text(text: str, field: str, tokenizer: ChatTokenizer, vocab_size: int) -> None:
    """Raise RequestError where any token of a text is outside the vocabulary, for texts that share a prompt with others."""
    for token in tokenizer.encode(text, add_special_tokens=False):
        if token >= vocab_size:
            raise _refusal(token, field, tokenizer, vocab_size)


def _refusal(token: TokenId, field: str, tokenizer: ChatTokenizer, vocab_size: int) -> RequestError:
    if text := _text(token, tokenizer):
        why = (
            f"the token {text!r} (id {token}) is outside the vocabulary of {vocab_size}: "
            "the tokenizer has it, but the model has no embedding of it"
        )
    else:
        why = f"token id {token} is outside the vocabulary of {vocab_size}"
    return RequestError(f"{field}: {why}", field=field)


def _text(token: TokenId, tokenizer: ChatTokenizer) -> str:
    """Return a token's text; empty where the tokenizer does not have it either."""
    for text, number in tokenizer.added_tokens.items():
        if number == token:
            return text
    return tokenizer.decode([token], skip_special_tokens=False) if 0 <= token < tokenizer.vocab_size else ""
