"""Whether two models have the same tokens, so that what one says can be read by the other."""

from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from core.errors import ConfigError
from models.text.tokenizer import load_tokenizer

_FILE = "tokenizer.json"


def check_same_vocabulary(draft: Path, target: Path, num_ids: int) -> None:
    """Raise ConfigError where one of the first `num_ids` tokens of the model in `draft` is another one, or none, in `target`."""
    if draft == target or _content(draft) == _content(target) is not None:
        return
    ids = _vocabulary(target)
    for token, number in sorted(_vocabulary(draft).items(), key=lambda pair: pair[1]):
        if number < num_ids and ids.get(token) != number:
            raise ConfigError(
                f"the draft model in {draft} has not the vocabulary of the model in {target}: its token {number} is {token!r}, "
                f"which is {ids.get(token, 'none')} there. Use a draft model that was made with the same tokenizer"
            )


def _content(folder: Path) -> bytes | None:
    file = folder / _FILE
    return file.read_bytes() if file.is_file() else None


def _vocabulary(folder: Path) -> Mapping[str, int]:
    file = folder / _FILE
    if file.is_file():
        return Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    return load_tokenizer(folder).vocabulary
