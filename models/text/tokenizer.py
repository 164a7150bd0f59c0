"""A model's tokenizer and chat template, through transformers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from core.errors import ConfigError, RequestError
from models.text.token_bytes import bytes_of_piece
from models.text.tokenizer_files import transformers_tokenizer


class Tokenizer:
    """A core.ports.TokenCodec, and the chat template."""

    def __init__(self, folder: Path) -> None:
        self._inner: Any = transformers_tokenizer(folder)
        # Seconds, in processes that tokenize alone.
        from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

        self._inner.chat_template = self._inner.chat_template or _beside(folder)
        kind, plain = type(self._inner), PreTrainedTokenizerFast
        is_plain = all(getattr(kind, name, None) is getattr(plain, name) for name in ("decode", "_decode"))
        self._decode: Any = self._inner.backend_tokenizer.decode if is_plain else self._decoded
        self.eos_token_id: int | None = self._inner.eos_token_id
        self.vocab_size = len(self._inner)
        named = self._inner.chat_template
        self.template: str = _source(named)
        self.template_names: Sequence[str] = tuple(named) if isinstance(named, Mapping) else ()
        added = self._inner.added_tokens_decoder
        self.added_tokens: Mapping[str, int] = {str(token): index for index, token in added.items()}
        self.special_tokens: Mapping[str, int] = {
            str(token): index for index, token in added.items() if token.special
        }

    @property
    def backend(self) -> Any:
        """The tokenizer of the library `tokenizers`. Raises ConfigError where this one has none."""
        if (found := getattr(self._inner, "backend_tokenizer", None)) is None:
            raise ConfigError(f"{type(self._inner).__name__} has no tokenizer of the library `tokenizers`")
        return found

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """The ids of all tokens."""
        return self._inner.get_vocab()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._inner.encode(text, add_special_tokens=add_special_tokens)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Return two texts as a cross-encoder reads them, and where the second begins for models that tell them apart, else 0."""
        encoding = self._inner(first, second)
        kinds = encoding.get("token_type_ids") or []
        return list(encoding["input_ids"]), kinds.index(1) if 1 in kinds else 0

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._decode(list(ids), skip_special_tokens=skip_special_tokens)

    def bytes_of_part(self, token: int) -> bytes | None:
        """Return the bytes of a token that is only part of a character; None where the vocabulary does not say."""
        piece: str = self._inner.convert_ids_to_tokens(token)
        # A vocabulary of texts may have U+FFFD itself.
        return piece.replace("\u2581", " ").encode() if "\ufffd" in piece else bytes_of_piece(piece)

    def _decoded(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """Decode where a tokenizer has its own way of it. The library of others is asked directly, once for each token:
        transformers takes three times as long."""
        return self._inner.decode(
            ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_name: str = "",
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        keeps_null: bool = False,
        **template_arguments: Any,
    ) -> str:
        """Return the text of a conversation, special tokens included. With `continue_final_message` it ends where the last
        message's text does. Of several templates it is that of `template_name`, or else `tool_use` with tools and `default`
        without. `keeps_null`: the template sees fields that are null, which transformers may leave out. Raises RequestError
        when the model has no template or refuses the messages."""
        if self._inner.chat_template is None:
            raise RequestError("this model has no chat template; use /v1/completions", field="messages")
        arguments: dict[str, Any] = {
            "chat_template": template_name or None,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **template_arguments,
        }
        try:
            if keeps_null:
                return self._rendered(messages, **arguments)
            return self._inner.apply_chat_template(list(messages), tokenize=False, **arguments)
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise RequestError(
                f"the chat template refuses these messages: {error}", field="messages"
            ) from error

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        chat_template: str | None,
        tools: Sequence[Mapping[str, Any]] | None,
        **arguments: Any,
    ) -> str:
        """Render as `apply_chat_template` does, without what it does to messages before."""
        from transformers.utils import chat_template_utils  # noqa: PLC0415 (as above)

        render: Any = chat_template_utils.render_jinja_template
        source = self._inner.get_chat_template(chat_template, tools)
        arguments = {**self._inner.special_tokens_map, **arguments}
        rendered, _ = render([list(messages)], tools=tools, chat_template=source, **arguments)
        return rendered[0]


def _source(template: str | Mapping[str, str] | None) -> str:
    """Return the source of all of a checkpoint's templates, where it has several."""
    return "\n".join(template.values()) if isinstance(template, Mapping) else template or ""


def _beside(folder: Path) -> str | dict[str, str] | None:
    """Return the template of a processor, which checkpoints of models that read images may have in a file of its own."""
    path = folder / "chat_template.json"
    found: Any = json.loads(path.read_text()).get("chat_template") if path.exists() else None
    return {each["name"]: each["template"] for each in found} if isinstance(found, list) else found


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load a tokenizer. Raises ConfigError."""
    return Tokenizer(Path(folder))
