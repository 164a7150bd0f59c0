"""How each `tokenizer.ggml.pre` of a GGUF file splits text before merges apply.

A GGUF file does not carry tokenizer.json: it names the split, and llama.cpp knows what each name means. Steps are those of
the models' own tokenizer.json where it is known, and llama.cpp's otherwise. `python -m benchmarks.engine.gguf_tokens` compares
each name with llama.cpp."""

from dataclasses import dataclass, replace
from typing import Final

from core.errors import UnsupportedModel

GGUF_SPLIT: Final = "gguf_split"
"""In tokenizer_config.json of a folder that was made of a GGUF file: what the file calls its split, or nothing."""

Step = tuple[str, str]
"""A kind and its argument. `split`: cut out what a regular expression matches. `digits` and `punctuation`: cut out `each` sign,
or each `run` of them. `bytes`: spell text as GPT-2's letters of bytes, after GPT-2's `split` or as a `whole`."""


@dataclass(frozen=True, slots=True)
class Split:
    steps: tuple[Step, ...]
    nfc: bool = False
    """The model's own tokenizer composes characters first; llama.cpp never does."""
    whole_words: bool = False
    """A piece that is a token stays whole, whatever merges say (`ignore_merges`)."""
    adds_bos: bool = False
    """What holds where the file does not say it (`add_bos_token`)."""
    is_text: bool = False
    """The vocabulary is of text with U+2581 for spaces, as SentencePiece's, not of bytes."""


_BYTES: Final[Step] = ("bytes", "whole")
_GPT2_BYTES: Final[Step] = ("bytes", "split")
_DIGITS: Final[Step] = ("digits", "each")
_ENDINGS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_HAN_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_HAN_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ASCII_PUNCTUATION: Final = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""


def _cased(upper: str, lower: str, endings: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{upper}*{lower}+{endings}|{start}{upper}+{lower}*{endings}"


def _words(digits: str, newlines: str = r"[\r\n]*", spaces: str = _SPACES) -> str:
    return rf"{_ENDINGS}|{_WORDS}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{newlines}{spaces}"


def _marked(newlines: str, spaces: str) -> str:
    """Words of letters and marks, one sign of ASCII before letters of ASCII, and runs of other signs."""
    words = _ASCII_PUNCTUATION + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    return rf"{words}| ?[\p{{P}}\p{{S}}]+{newlines}{spaces}"


def _split(*expressions: str) -> tuple[Step, ...]:
    return (*(("split", each) for each in expressions), _BYTES)


_LLAMA3: Final = _words(r"\p{N}{1,3}")
_QWEN2: Final = _words(r"\p{N}")
_O200K: Final = _cased(_UPPER, _LOWER, f"{_ENDINGS}?") + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
_TEKKEN: Final = _cased(_UPPER, _LOWER, "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
_KIMI: Final = (
    r"\p{Han}+|"
    + _cased(_HAN_UPPER, _HAN_LOWER, f"{_ENDINGS}?")
    + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    + _SPACES
)
_QWEN35: Final = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_SPACES}"
_KANA: Final = "[一-龥\u3040-ゟ゠-ヿ]+"
_HANZI: Final = "[一-龥ࠀ-一가-\ud7ff]+"
_DEEPSEEK3: Final = _split(r"\p{N}{1,3}", _KANA, _marked(r"[\r\n]*", _SPACES))
_BLOOM: Final = r" ?[^(\s|.,!?…。，、।۔،)]+"
_FROM_THE_RIGHT: Final = r"\d{1,3}(?=(?:\d{3})*\b)"
"""Groups of three digits, counted from the last one."""
_EUROPEAN: Final = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-"
    "\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""The letters of scripts that tell capitals from others, as DeepSeek LLM lists them."""
_EAST_ASIAN: Final = "[一-鿿㐀-䶿\uf900-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+"
_HANGUL: Final = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+"
_HALVED: Final = "".join(rf"|\s{{{1 << power}}}(?!\S)" for power in range(9, 1, -1))

_GPT2_SPLIT: Final = Split((_GPT2_BYTES,))
_NEOX_SPLIT: Final = replace(_GPT2_SPLIT, nfc=True)
_LLAMA3_SPLIT: Final = Split(_split(_LLAMA3), whole_words=True, adds_bos=True)
_TEKKEN_SPLIT: Final = Split(_split(_TEKKEN), whole_words=True, adds_bos=True)
_QWEN2_SPLIT: Final = Split(_split(_QWEN2))
_QWEN2_NFC: Final = replace(_QWEN2_SPLIT, nfc=True)
_O200K_SPLIT: Final = Split(_split(_O200K), whole_words=True)
_DIGIT_SPLIT: Final = Split((_DIGITS, _GPT2_BYTES))
_DEEPSEEK3_SPLIT: Final = Split(_DEEPSEEK3)
_BLOOM_SPLIT: Final = Split(_split(_BLOOM))
_BAILING_SPLIT: Final = Split(
    _split(
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    )
)
_TEXT_SPLIT: Final = Split((("split", r"[^\n]+|[\n]+"),), is_text=True)

DEFAULT: Final = Split(_split(r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
"""What llama.cpp takes for a file that names no split, and for `default`."""


def _named(split: Split, *names: str) -> dict[str, Split]:
    return dict.fromkeys(names, split)


SPLITS: Final[dict[str, Split]] = {
    "default": DEFAULT,
    **_named(_LLAMA3_SPLIT, "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "midm-2.0", "lfm2"),
    **_named(Split(_split(_LLAMA3)), "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
    # Pixtral's tokenizer.json has Llama 3's split; Mistral's own library, and so its training, has Tekken's.
    **_named(_TEKKEN_SPLIT, "tekken", "pixtral"),
    **_named(_QWEN2_NFC, "qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez"),
    **_named(_QWEN2_SPLIT, "stablelm2", "hunyuan", "solar-open", "grok-2"),
    "qwen35": Split(_split(_QWEN35), nfc=True),
    # Their vocabularies were made from tiktoken's, which looks whole pieces up first.
    **_named(_O200K_SPLIT, "gpt-4o", "llama4", "granite-embed-multi-97m"),
    **_named(replace(_O200K_SPLIT, whole_words=False), "kanana2", "talkie", "minimax-m2"),
    **_named(_DEEPSEEK3_SPLIT, "deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
    "deepseek-llm": Split(
        (
            *_split(r"[\r\n]", rf"\s?[{_EUROPEAN}]+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _HANZI)[
                :-1
            ],
            _DIGITS,
            _BYTES,
        )
    ),
    "deepseek-coder": Split((*_split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HANZI)[:-1], _DIGITS, _BYTES)),
    "spark2_5": Split(_split(r"\p{N}{1,3}", _KANA, _marked("", r"|[\r\n]|\s+(?!\S)|\s+"), r"\p{N}")),
    "youtu": Split(
        _split(
            _HANGUL,
            _cased(_UPPER, _LOWER, f"{_ENDINGS}?") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES,
        ),
        whole_words=True,
    ),
    "falcon": Split((("punctuation", "run"), _GPT2_BYTES, ("digits", "run"), ("split", "[0-9][0-9][0-9]"))),
    **_named(_DIGIT_SPLIT, "starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
    "command-r": replace(_DIGIT_SPLIT, nfc=True),
    **_named(_GPT2_SPLIT, "gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "jais", "trillion"),
    **_named(_GPT2_SPLIT, "granite-docling", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de"),
    **_named(_NEOX_SPLIT, "mpt", "olmo", "modern-bert"),
    **_named(_BLOOM_SPLIT, "bloom", "poro-chat", "gpt3-finnish"),
    "viking": Split((("split", _BLOOM), _DIGITS, _BYTES)),
    "chameleon": Split(
        (
            ("split", "<sentinel:[0-9]+>"),
            ("split", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z"),
            ("split", r"([\t\n]|    |  )"),
            _DIGITS,
            ("punctuation", "each"),
            _GPT2_BYTES,
        ),
        adds_bos=True,
    ),
    **_named(Split(_split(_FROM_THE_RIGHT, _O200K)), "tiny_aya", "cohere2moe"),
    "kimi-k2": Split(_split(_KIMI), whole_words=True),
    "superbpe": Split(_split(r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    **_named(_BAILING_SPLIT, "bailingmoe", "bailingmoe2", "llada-moe"),
    "seed-coder": Split(_split(rf"{_ENDINGS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_SPACES}")),
    "ufakzeka": Split(_split(rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}")),
    "afmoe": Split(
        _split(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _EAST_ASIAN, _marked(r"[\r\n]*", _SPACES))
    ),
    "laguna": Split(_split(r"[^\n]+|[\n]+", _QWEN2)),
    "exaone-moe": Split(
        _split(
            rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
        )
    ),
    "jais-2": Split(_split(_words(r"\p{N}{1,3}", spaces=rf"|\s*[\r\n]+{_HALVED}|\s{{1,2}}(?!\S)|\s{{1}}"))),
    "minicpm5": Split(_split(r"\p{N}{1,3}", _words(r"\p{N}+")), whole_words=True),
    **_named(_TEXT_SPLIT, "gemma4", "sarvam-moe"),
}


def split_of(name: str | None, file: str) -> Split:
    """Return the split that `file` names. Raises UnsupportedModel."""
    if not name:
        return DEFAULT
    if (found := SPLITS.get(name)) is None:
        raise UnsupportedModel(
            f"{file} splits text as {name!r} (tokenizer.ggml.pre), which Baton does not know, and any other split would give "
            "other tokens: serve the model's Hugging Face folder instead, whose tokenizer.json has the split"
        )
    return found
