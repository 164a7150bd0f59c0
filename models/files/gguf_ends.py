"""Which tokens of a GGUF file begin and end texts.

A file names the end of a text, and seldom that of a turn, or of a message that calls tools. Those are found by their text, as
llama.cpp finds them."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

KEYS: Final = "tokenizer.ggml."
"""How the names of what a file says of its tokens begin."""
_TURN_ENDS: Final = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "<|endoftext|>",
    "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[", "</s>", "<eos>",
)  # fmt: skip
_MESSAGE_END: Final = "<|eom_id|>"
_ALSO_TAGS: Final = ("</s>", "<eos>")
"""Texts that some vocabularies have as HTML. They end a text where the file calls them control tokens."""
_WITHIN_TURNS: Final = (("<|return|>", "<|call|>"), ("<|calls|>", "<|flush|>"))
"""With both of a pair, `<|end|>` ends one message of several."""
CONTROL: Final = 3
"""llama.cpp's number for control tokens."""
SENTENCEPIECE: Final = {"bos": 1, "eos": 2, "unk": 0}
"""What llama.cpp takes where a vocabulary of SentencePiece names none."""


def text_ends(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return `eos_token_id`, and `bos_token_id` where there is one."""
    defaults = SENTENCEPIECE if metadata.get(f"{KEYS}model") == "llama" else {}
    known = {
        name: metadata.get(f"{KEYS}{name}_token_id", defaults.get(name))
        for name in ("bos", "eos", "eot", "eom")
    }
    ends = [int(known[name]) for name in ("eos", "eot", "eom") if known[name] is not None]
    if known["eot"] is None or known["eom"] is None:
        tokens: Sequence[str] = metadata.get(f"{KEYS}tokens", ())
        found = ends_by_text(tokens, metadata.get(f"{KEYS}token_type", ()))
        if known["eot"] is None:
            ends += [token for token in found if tokens[token] != _MESSAGE_END]
        if known["eom"] is None:
            ends += [token for token in found if tokens[token] == _MESSAGE_END]
    texts: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(ends))}
    return texts if known["bos"] is None else {**texts, "bos_token_id": int(known["bos"])}


def ends_by_text(tokens: Sequence[str], types: Sequence[int]) -> list[int]:
    """Return the ids of tokens that end a turn, a text or a message by what they are called."""
    wanted = {*_TURN_ENDS, _MESSAGE_END}
    found = {text: index for index, text in enumerate(tokens) if text in wanted}
    for text in _ALSO_TAGS:
        if text in found and types and types[found[text]] != CONTROL:
            del found[text]
    if any(all(text in found for text in pair) for pair in _WITHIN_TURNS):
        found.pop("<|end|>", None)
    return sorted(found.values())
