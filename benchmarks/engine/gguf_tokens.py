"""Whether a GGUF file's tokens are llama.cpp's: `python -m benchmarks.engine.gguf_tokens [--environments build/cpu-peers]`.

Each name that `tokenizer.ggml.pre` may have gets a vocabulary of its own file, whose merges run over whole texts, so that a split
in another place gives other tokens. Baton's tokens of hard texts are compared with those of llama.cpp's own library, which
`python -m benchmarks.cpu.install --peers llama_cpp` installs. Where they differ, llama.cpp approximates what the model's own
tokenizer.json says: `WHY` says how. Models whose own tokenizer composes characters are compared on composed texts."""

import hashlib
import json
import random
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import gguf
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from benchmarks.cpu.install import python_of
from benchmarks.report import parser, write
from models.files.gguf_splits import DEFAULT, SPLITS
from models.files.gguf_tokenizer import write_tokenizer
from models.text.tokenizer_files import transformers_tokenizer

_ROOT: Final = Path(__file__).parents[2]
_SIZE: Final = 3000
_TEXTS: Final = "texts.json"
_END: Final = "<|endoftext|>"
MISSING: Final = "missing"
"""The file that names no split."""
_CASES: Final = "llama.cpp knows capitals of ASCII alone, and takes marks for no part of words"
_NO_SPACE: Final = (
    "spaces from U+2000 on are among the letters that are cut out, which llama.cpp reads as U+000B"
)
_NO_CASES: Final = "llama.cpp tells no capitals from small letters, and takes marks for no part of words"
_WORD_ENDS: Final = "\\b is none before letters of other scripts; llama.cpp groups digits before them, too"
WHY: Final = {
    **dict.fromkeys(
        ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "tekken", "granite-embed-multi-97m"), _CASES
    ),
    **dict.fromkeys(("youtu", "kimi-k2"), _NO_CASES),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), f"{_NO_CASES}; {_WORD_ENDS}"),
    "pixtral": "llama.cpp has Llama 3's split, which tokenizer.json of that model has by mistake",
    "deepseek-llm": f"digits are single, which llama.cpp joins; {_NO_SPACE}",
    "deepseek-coder": _NO_SPACE,
    "falcon": "digits are cut out of GPT-2's letters, of which six that stand for bytes are digits",
    "superbpe": "\\d of other scripts is grouped, too",
    "afmoe": "llama.cpp joins text before digits with the first of them",
}  # fmt: skip
"""How llama.cpp's tokens are others than those of a model's own tokenizer.json."""


def hard_texts(count: int) -> list[str]:
    """Return texts of every kind of sign, and mixtures of their parts."""
    rng = random.Random(0)
    parts = [part for text in _KINDS for part in (text, *text.split(" "))]
    plain = [part for part in parts if part.isascii()]
    mixed = [
        "".join(rng.choice(plain if number % 2 else parts) + rng.choice(_GAPS) for _ in range(6))
        for number in range(count)
    ]
    return [*_KINDS, *mixed]


_GAPS: Final = ("", " ", "  ", "\n", "\n\n", "\t", " \n ", "\r\n", "'", ".", "/", "123", "1234567")
_KINDS: Final = (
    " leading, trailing   ",
    "def tell(story: str):\n    return {'a': [1, 2.5e-3]}  # why\n\n\n\ttabs\t\tand  runs   of    spaces",
    "x+=1;y<<=2;a!=b;c->d::e&&!f||g?h:i//j $PATH `pwd` ~^|\\ @#% {[()]} <|x|> ``` === ___",
    "1 12 123 1234 12345 123456 1234567 12345678 123456789 3.14159 1,234,567.89 0x1F ½ ² ٣٤٥ १२३",
    "I'm you're he'll we've it's don't I'D YOU'RE HE'LL WE'VE IT'S DON'T 'tis ‘quoted’ l'été",
    "HelloWorld iPhone XMLHttpRequest snake_case SCREAMING_CASE ΑΒΓαβγ ПриветМИР ʰʲ",
    "我想在apple工作1314151天～ 日本語のテキスト、カタカナ。한국어 문장입니다! 𠮷野家",
    "مرحبا بالعالم، كيف الحال؟ שלום עולם, מה שלומך?",
    "สวัสดีชาวโลก កាន់តែពិសេស မြန်မာ ລາວ",
    "नमस्ते दुनिया, आप कैसे हैं? বাংলা தமிழ்",
    "😀😃 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 ✅ ①②③ ™ € ∑∫√",
    "e\u0301 n\u0303 A\u030a ﬁ ｆｕｌｌ　ｗｉｄｔｈ Übergrößenträger Việt",
    "zero\u200bwidth no-break\u00a0space\u2003em\u2028line\u3000ideographic",
    "mixed Россия中国Ελλάδα123عربي!?—…«»„“",
    "!!!!!! ?????? ...... ------ '''''' \"\"\"\"\"\" ////// \\\\\\\\",
)


Ids = Sequence[Sequence[int]]


def write_files(folder: Path, texts: Sequence[str], names: Sequence[str | None]) -> None:
    """Write a file of the same vocabulary for each name of a split."""
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        texts, BpeTrainer(vocab_size=_SIZE, initial_alphabet=alphabet, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    for name in names:
        writer = gguf.GGUFWriter(str(folder / f"{name or MISSING}.gguf"), "llama")
        writer.add_tokenizer_model("gpt2")
        if name:
            writer.add_tokenizer_pre(name)
        tokens = sorted(model["vocab"], key=model["vocab"].get)
        writer.add_token_list([*tokens, _END])
        writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL])
        writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
        writer.add_bos_token_id(len(tokens))
        writer.add_eos_token_id(len(tokens))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()


def own_ids(folder: Path, texts: Sequence[str]) -> dict[str, list[list[int]]]:
    found: dict[str, list[list[int]]] = {}
    for path in sorted(folder.glob("*.gguf")):
        with tempfile.TemporaryDirectory() as made:
            write_tokenizer(path, Path(made))
            tokenizer = transformers_tokenizer(Path(made))
        found[path.stem] = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return found


def their_ids(environments: Path, folder: Path, texts: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return llama.cpp's version, and the ids of each file; null for those that this release refuses."""
    if (python := python_of(environments, "llama_cpp")) is None:
        sys.exit(f"llama.cpp is not in {environments}: python -m benchmarks.cpu.install --peers llama_cpp")
    (folder / _TEXTS).write_text(json.dumps(texts))
    command = [str(python), "-m", "benchmarks.engine.gguf_peer", str(folder), str(folder / _TEXTS)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"llama.cpp failed: {done.stderr.strip().splitlines()[-1:]}")
    answer = json.loads(done.stdout)
    return answer["version"], answer["ids"]


def digest(name: str) -> str:
    """Return what tells one version of a split from another."""
    split = DEFAULT if name == MISSING else SPLITS[name]
    return hashlib.sha256(repr(split).encode()).hexdigest()[:12]


def compared(name: str, texts: Sequence[str], own: Ids, theirs: Ids, plain: Ids) -> dict[str, Any]:
    """`plain` is what GPT-2's split gives: for how many texts a wrong split would have other tokens."""
    differ = [mine != his for mine, his in zip(own, theirs, strict=True)]
    row: dict[str, Any] = {
        "split": digest(name),
        "texts": len(texts),
        "differ": sum(differ),
        "differ_in_ascii": sum(each for each, text in zip(differ, texts, strict=True) if text.isascii()),
        "differ_with_gpt2": sum(his != other for his, other in zip(theirs, plain, strict=True)),
    }
    return row | ({"why": WHY[name]} if any(differ) and name in WHY else {})


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--environments", type=Path, default=Path("build/cpu-peers"))
    options.add_argument("--show", metavar="NAME", help="print the texts whose tokens differ")
    args = options.parse_args()
    texts = hard_texts(20 if args.smoke else 600)
    names = [name for name, split in SPLITS.items() if not split.is_text]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        composed = [unicodedata.normalize("NFC", text) for text in texts]
        write_files(folder, [*texts, *composed], [None, *names])
        version, theirs = their_ids(args.environments, folder, [*texts, *composed])
        own = own_ids(folder, texts)
    for name in names:
        if SPLITS[name].nfc:
            theirs[name] = theirs[name][len(texts) :]
    rows = {name: compared(name, texts, own[name], theirs[name][: len(texts)], own["gpt-2"]) for name in own}
    for name, row in rows.items():
        print(f"{name:26} {json.dumps(row)}")
    if args.show:
        for text, mine, his in zip(texts, own[args.show], theirs[args.show], strict=False):
            if mine != his:
                print(repr(text), mine, his, sep="\n  ")
    write(args.json, "benchmarks.engine.gguf_tokens", {"llama_cpp": version, "names": rows})


if __name__ == "__main__":
    main()
