"""Writes the tokenizer of a GGUF file as Hugging Face's files: `python -m models.gguf_tokenizer FILE FOLDER`.

A process of its own, since transformers needs torch for that and an ingress leaves torch out."""

import sys
from pathlib import Path

from transformers import AutoTokenizer

from models.gguf_reader import field, open_gguf


def main() -> None:
    path, folder = Path(sys.argv[1]), sys.argv[2]
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"transformers cannot make a tokenizer of {path.name}: {error}")
    if tokenizer.chat_template is None:
        tokenizer.chat_template = field(open_gguf(path), "tokenizer.chat_template")
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
