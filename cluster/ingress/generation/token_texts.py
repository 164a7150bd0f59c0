"""The text and the bytes of single tokens, so that those of a sequence's tokens join to its text."""

from cluster.ingress.delivery.generator import ChatTokenizer

_UNREADABLE = "\ufffd"


class TokenTexts:
    """A token is decoded after another one: SentencePiece's decoders drop the space from the first token of a text.

    `leads` says that the token is the first one, so that its text lacks that space, too."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer.encode("a", add_special_tokens=False)
        self._text_before = self._decode(self._before)

    def text(self, token: int, *, leads: bool = False) -> str:
        """Return the token's text. The part of a character is unreadable and has U+FFFD."""
        if leads:
            return self._decode([token])
        both = self._decode([*self._before, token])
        return both[len(self._text_before) :] if both.startswith(self._text_before) else self._decode([token])

    def data(self, token: int, *, leads: bool = False) -> bytes | None:
        """Return the token's bytes, also of a part of a character; None where the vocabulary does not say them."""
        text = self.text(token, leads=leads)
        return self._tokenizer.bytes_of_part(token) if _UNREADABLE in text else text.encode()

    def name(self, token: int, *, leads: bool = False) -> str:
        """Return the token's text, or its bytes as OpenAI's completions write the part of a character."""
        text = self.text(token, leads=leads)
        data = self._tokenizer.bytes_of_part(token) if _UNREADABLE in text else None
        return text if data is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)
