"""GGUF files of a vocabulary alone, as llama.cpp's converter writes them of a model's tokenizer.json."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf

from models.text.token_bytes import FALLBACK

HARD_TEXTS = (
    "",
    " ",
    " Hello world",
    "  two spaces, then\ttab\t\tand tabs \t mixed",
    "trailing spaces   ",
    "\n",
    "\n\n\n",
    "line\r\n\r\n  next\r\n",
    " \n \n\n\t\n",
    " " * 47 + "x" + "\n" * 39 + "y" + "\t" * 19,
    "def tell(story: str) -> None:\n    if not story:\n        return {'a': [1, 2.5e-3], \"b\": None}  # why\n",
    "x+=1;y<<=2;a!=b;c->d::e&&!f||g?h:i//j/*k*/ $PATH `pwd` ~^|\\ <|> @#% {[()]}",
    " ".join("1234567890" [: n] * 1 for n in range(1, 11)) + " 1234567890123 3.14159 1,234,567.89 0x1F ½ ² ٣٤٥ १२३ Ⅷ",
    "I'm you're he'll we've it's don't I'D YOU'RE HE'LL WE'VE IT'S DON'T 'tis ‘quoted’ rock'n'roll l'été",
    "HelloWorld iPhone XMLHttpRequest snake_case kebab-case SCREAMING_CASE ΑΒΓαβγ ПриветМИР ǅungla ʰʲ",
    "我想在apple工作1314151天～ 日本語のテキスト、カタカナ。한국어 문장입니다! 𠮷野家 ㄅㄆㄇ",
    "مرحبا بالعالم، كيف الحال؟ שלום עולם, מה שלומך?",
    "สวัสดีชาวโลก ภาษาไทย កាន់តែពិសេសអាចខលចេញ မြန်မာ ລາວ",
    "नमस्ते दुनिया, आप कैसे हैं? বাংলা தமிழ் తెలుగు",
    "😀😃 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 😶‍🌫️ ✅ ①②③ ™ € £ ∑∫√ ≠",
    "e\u0301 n\u0303 A\u030a ﬁ Å Ω ｆｕｌｌ　ｗｉｄｔｈ",
    "zero\u200bwidth\u200djoin\ufeff no-break\u00a0space\u2003em\u2028line\u0085next\u3000ideographic",
    "mixed Россия中国Ελλάδα123عربي!?—…«»„“",
    "!!!!!! ?????? ...... ------ ====== ______ ###### '''''' \"\"\"\"\"\" `````` ////// \\\\\\\\\\\\",
    "▁▁under▁lines▁ <0x0A> <unk> Ġletter Ċ",
    "Cửa Việt Äpfel naïve Übergrößenträger Zażółć gęślą jaźń İstanbul",
)  # fmt: skip


def write_vocabulary(
    path: Path,
    tokenizer: Mapping[str, Any],
    pre: str | None,
    extra: Mapping[str, Any] | None = None,
    size: int = 0,
) -> None:
    """`tokenizer` is what tokenizer.json holds; `size` is how many rows the model's embedding has, if more than tokens."""
    model, is_pieces = tokenizer["model"], pre is None and tokenizer["model"].get("byte_fallback")
    ids: dict[str, int] = {
        **model["vocab"],
        **{each["content"]: each["id"] for each in tokenizer["added_tokens"]},
    }
    named = {index: text for text, index in ids.items()}
    size = max(size, max(named) + 1)
    tokens = [named.get(index, f"[PAD{index}]") for index in range(size)]
    types = [gguf.TokenType.NORMAL if index in named else gguf.TokenType.UNUSED for index in range(size)]
    if is_pieces:
        types = [
            gguf.TokenType.BYTE if FALLBACK.fullmatch(text) else kind
            for text, kind in zip(tokens, types, strict=True)
        ]
    for each in tokenizer["added_tokens"]:
        is_control = each["special"] or _looks_special(each["content"])
        types[each["id"]] = gguf.TokenType.CONTROL if is_control else gguf.TokenType.USER_DEFINED
        if not is_control:
            tokens[each["id"]] = each["content"].replace("\u2581", " ")
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("llama" if is_pieces else "gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if is_pieces:
        writer.add_token_scores(_scores(tokens, types, merges_of(model["merges"])))
    else:
        writer.add_token_merges(merges_of(model["merges"]))
    add_values(writer, extra or {})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_values(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
    """Add keys of the tokenizer: numbers are ids."""
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_uint32(f"tokenizer.ggml.{key}", value)


def merges_of(merges: Sequence[str | Sequence[str]]) -> list[str]:
    return [each if isinstance(each, str) else " ".join(each) for each in merges]


def read_tokenizer(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "tokenizer.json").read_text())


def _looks_special(text: str) -> bool:
    """Return whether the converter takes a token for one of control, whatever tokenizer.json says."""
    pairs = (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))
    return text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or any(
        text.startswith(start) and text.endswith(end) for start, end in pairs
    )


def _scores(tokens: Sequence[str], types: Sequence[gguf.TokenType], merges: Sequence[str]) -> list[float]:
    """Return SentencePiece's scores, which tokenizer.json has as the order of merges; added tokens get the converter's."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    return [
        -float(ranks.get(text, len(merges))) if kind == gguf.TokenType.NORMAL else -1000.0
        for text, kind in zip(tokens, types, strict=True)
    ]
