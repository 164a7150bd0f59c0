"""Writes the tokenizer of a GGUF file as Hugging Face's files: `python -m models.files.gguf_tokenizer FILE FOLDER`.

A process of its own where neither is loaded: transformers needs torch for that, and an ingress leaves torch out."""

import sys
from pathlib import Path

from transformers import AutoTokenizer

from core.errors import ConfigError
from models.files.gguf_reader import field, open_gguf


def write_tokenizer(path: Path, folder: Path) -> None:
    """Raises ConfigError."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"transformers cannot make a tokenizer of {path.name}: {error}") from None
    if tokenizer.chat_template is None:
        tokenizer.chat_template = field(open_gguf(path), "tokenizer.chat_template")
    tokenizer.save_pretrained(str(folder))


def main() -> None:
    try:
        write_tokenizer(Path(sys.argv[1]), Path(sys.argv[2]))
    except ConfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
