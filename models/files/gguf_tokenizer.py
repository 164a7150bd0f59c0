"""Writes the tokenizer of a GGUF file as Hugging Face's files: `python -m models.files.gguf_tokenizer FILE FOLDER`.

Everything comes from the file's metadata, whatever its architecture. A process of its own where neither is loaded: transformers
needs torch for that, and an ingress leaves torch out."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from core.errors import ConfigError, UnsupportedModel
from models.files.gguf_ends import CONTROL, KEYS, SENTENCEPIECE, ends_by_text
from models.files.gguf_merges import merges_of_ranks, merges_of_scores
from models.files.gguf_metadata import read_metadata
from models.files.gguf_splits import GGUF_SPLIT, SPLITS, Split, Step, split_of

_TEMPLATE: Final = "tokenizer.chat_template"
_NORMAL, _UNKNOWN, _USER_DEFINED, _UNUSED = 1, 2, 4, 5
_NAMED: Final = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_REFUSED: Final = {
    "bert": "WordPiece of BERT",
    "t5": "Unigram of T5",
    "rwkv": "RWKV's",
    "plamo2": "PLaMo 2's",
    "hybriddna": "HybridDNA's",
    "whitespace": "a split at spaces",
    "none": "none at all",
    "no_vocab": "none at all",
}
_GEMMA: Final = ["<pad>", "<eos>", "<bos>", "<unk>"]
"""The first tokens of each Gemma's vocabulary."""
_PHI3_KEEPS: Final = ("<unk>", "<s>", "<|endoftext|>")
"""Phi 3 drops spaces after its added tokens, those excepted."""
_SPACE: Final = "\u2581"


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    metadata: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{KEYS}{key}", default)

    @property
    def tokens(self) -> list[str]:
        return self.get("tokens", [])

    @property
    def types(self) -> Sequence[int]:
        return self.get("token_type") or [_NORMAL] * len(self.tokens)

    @property
    def is_bytes(self) -> bool:
        """Whether tokens are spelled in GPT-2's letters of bytes, and not as text."""
        return self.get("model") == "gpt2" and not (
            self.get("pre") in SPLITS and SPLITS[self.get("pre")].is_text
        )


def write_tokenizer(path: Path, folder: Path) -> None:
    """Raises ConfigError and UnsupportedModel."""
    file = _File(path.name, read_metadata(path))
    try:
        tokenizer = _wrapped(file)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"{path.name} has no tokenizer that can be read: {error}") from None
    tokenizer.save_pretrained(str(folder))
    settings = folder / "tokenizer_config.json"
    # Loading needs to know that tokenizer.json is the whole truth, and whether the file named its split.
    said = {**json.loads(settings.read_text()), GGUF_SPLIT: _split_name(file)}
    settings.write_text(json.dumps(said, indent=2, ensure_ascii=False))


def _split_name(file: _File) -> str:
    """Return the name of the split; empty where there should be one."""
    return str(file.get("pre") or "") if file.get("model") == "gpt2" else str(file.get("model"))


def _wrapped(file: _File) -> PreTrainedTokenizerFast:
    kind, size = file.get("model"), len(file.tokens)
    if kind not in ("gpt2", "llama", "gemma4"):
        what = _REFUSED.get(str(kind), "not known here")
        raise UnsupportedModel(
            f"{file.name} has the tokenizer {kind!r} ({what}): of GGUF gpt2, llama and gemma4 are read. "
            "Serve the model's Hugging Face folder instead"
        )
    split = split_of(kind if kind == "gemma4" else file.get("pre"), file.name) if kind != "llama" else None
    backend = (
        _of_pieces(file) if split is None else _of_text(file) if split.is_text else _of_bytes(file, split)
    )
    backend.add_tokens(_added(file))
    defaults = SENTENCEPIECE if split is None else {}
    ids = {name: file.get(f"{key}_token_id", defaults.get(name)) for name, key in _NAMED.items()}
    named = {f"{name}_token": file.tokens[at] for name, at in ids.items() if at is not None and at < size}
    adds_bos = split is None or split.adds_bos
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        # Gemma 4's own tokenizer adds none, since its template does; llama.cpp adds one to any text.
        add_bos_token=kind != "gemma4" and bool(file.get("add_bos_token", adds_bos)),
        add_eos_token=bool(file.get("add_eos_token", False)),
        chat_template=_templates(file.metadata),
        clean_up_tokenization_spaces=False,
        **named,
    )


def _of_bytes(file: _File, split: Split) -> Tokenizer:
    ids = _ids(file)
    merges = file.get("merges")
    pairs = merges_of_ranks(ids) if merges is None else [tuple(each.split(" ", 1)) for each in merges]
    tokenizer = Tokenizer(BPE(vocab=ids, merges=pairs, ignore_merges=split.whole_words))
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([_step(each) for each in split.steps])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _step(step: Step) -> Any:
    kind, argument = step
    if kind == "split":
        return pre_tokenizers.Split(Regex(argument), behavior="isolated")
    if kind == "digits":
        return pre_tokenizers.Digits(individual_digits=argument == "each")
    if kind == "punctuation":
        return pre_tokenizers.Punctuation(behavior="isolated" if argument == "each" else "contiguous")
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=argument == "split")


def _of_text(file: _File) -> Tokenizer:
    """BPE over text in which spaces are U+2581, with merges of its own."""
    ids = _ids(file)
    pairs = [tuple(each.split(" ", 1)) for each in file.get("merges")]
    return _spaced(Tokenizer(_with_fallback(ids, pairs, file)), has_prefix=False)


def _of_pieces(file: _File) -> Tokenizer:
    """SentencePiece's vocabulary, whose merges follow from its scores."""
    ids, types = _ids(file), file.types
    scores, has_prefix = file.get("scores"), bool(file.get("add_space_prefix", True))
    if len({score for score, kind in zip(scores, types, strict=False) if kind == _NORMAL}) == 1:
        # Converters that read tokenizer.json know no scores: there, ids are in the order of merges.
        scores = [-float(index) for index in range(len(scores))]
    elif file.tokens[:4] == _GEMMA:
        # Converters overwrite the scores of user-defined tokens, which SentencePiece has before all others.
        scores = [0.0 if kind == _USER_DEFINED else score for score, kind in zip(scores, types, strict=False)]
    pairs = merges_of_scores(ids, scores)
    tokenizer = _spaced(Tokenizer(_with_fallback(ids, pairs, file)), has_prefix=has_prefix)
    if has_prefix and "[INST]" in file.tokens:
        # Mistral's from the third on: text after a special token has no space of its own.
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def _with_fallback(ids: dict[str, int], pairs: list[tuple[str, str]], file: _File) -> BPE:
    unknown = file.get("unknown_token_id", 0)
    return BPE(vocab=ids, merges=pairs, unk_token=file.tokens[unknown], fuse_unk=True, byte_fallback=True)


def _spaced(tokenizer: Tokenizer, *, has_prefix: bool) -> Tokenizer:
    """Have a tokenizer read and write spaces as U+2581, with one more before each text if `has_prefix`."""
    read, write = normalizers.Replace(" ", _SPACE), [decoders.Replace(_SPACE, " "), decoders.ByteFallback()]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), read]) if has_prefix else read
    ends = [decoders.Fuse(), *([decoders.Strip(" ", 1, 0)] if has_prefix else [])]
    tokenizer.decoder = decoders.Sequence([*write, *ends])
    if not has_prefix:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    return tokenizer


def _ids(file: _File) -> dict[str, int]:
    """Return the vocabulary, without what a converter fills holes with."""
    types = file.types
    return {
        _spelled(text, file): index
        for index, text in enumerate(file.tokens)
        if not (types[index] == _UNUSED and text == f"[PAD{index}]")
    }


def _spelled(text: str, file: _File) -> str:
    """Return a token as tokenizer.json has it: converters write runs of U+2581 as spaces."""
    return _SPACE * len(text) if text[:1] == " " and not text.strip(" ") and not file.is_bytes else text


def _added(file: _File) -> list[AddedToken]:
    """Return the tokens that are found in texts before anything is split."""
    ends = set(ends_by_text(file.tokens, file.types))
    strips_after = file.metadata.get("general.architecture") == "phi3" and not file.is_bytes
    added: list[AddedToken] = []
    for index, (text, kind) in enumerate(zip(file.tokens, file.types, strict=False)):
        is_special = kind in (CONTROL, _UNKNOWN) or index in ends
        if is_special or kind == _USER_DEFINED:
            strips = strips_after and text not in _PHI3_KEEPS
            added.append(
                AddedToken(_spelled(text, file), normalized=False, special=is_special, rstrip=strips)
            )
    return added


def _templates(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template, or all of them by name."""
    default: str | None = metadata.get(_TEMPLATE)
    names = metadata.get("tokenizer.chat_templates") or []
    others = {name: metadata[f"{_TEMPLATE}.{name}"] for name in names if f"{_TEMPLATE}.{name}" in metadata}
    if not others:
        return default
    return others if default is None else {"default": default, **others}


def main() -> None:
    try:
        write_tokenizer(Path(sys.argv[1]), Path(sys.argv[2]))
    except ConfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
