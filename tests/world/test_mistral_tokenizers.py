"""Mistral's tokenizers load from the files that Mistral publishes, and give the ids that its own library gives."""

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import pre_tokenizers

from core.errors import ConfigError
from models.text.tokenizer import load_tokenizer
from tests.clients.run_client import install_python
from tests.world.artefacts import artefact

pytestmark = pytest.mark.slow
TEXTS = ("Hello  wide world 水🙂 it's", "def f(x):\n\treturn 1234567 + x  # Straße HTTPServer iPhone", " x")
TEKKEN, SENTENCE_PIECE = "tekken_240911.json", "mistral_instruct_tokenizer_240323.model.v3"
CONFIG = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "transformers_version": "4.45.0"}


@pytest.fixture(scope="module")
def their_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mistral-common and sentencepiece, in a folder of their own: an instance does not need them."""
    folder = tmp_path_factory.mktemp("packages")
    install_python("mistral-common", folder)
    return folder


def published(folder: Path, file: str, name: str) -> Path:
    shutil.copy(artefact("tekken") / file, folder / name)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def in_a_process_with(packages: Path, code: str) -> Any:
    """What `code` prints, in a process that finds `packages`: transformers looks for them once, when it is imported."""
    path = f"import sys; sys.path[:0] = [{str(packages)!r}, {str(Path(__file__).parents[2])!r}]\n"
    done = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_tekken_gives_the_ids_of_mistrals_own_library(tmp_path: Path, their_library: Path) -> None:
    folder = published(tmp_path, TEKKEN, "tekken.json")
    ours, theirs, decoded, ends = in_a_process_with(
        their_library,
        f"""
import json
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from models.text.tokenizer import load_tokenizer
tokenizer, texts = load_tokenizer({str(folder)!r}), {TEXTS!r}
reference = Tekkenizer.from_file({str(folder / "tekken.json")!r})
ours = [tokenizer.encode(text) for text in texts]
theirs = [reference.encode(text, True, False) for text in texts]
print(json.dumps([ours, theirs, [tokenizer.decode(ids) for ids in ours], tokenizer.eos_token_id]))
""",
    )
    assert ours == theirs
    assert tuple(decoded) == TEXTS
    assert ends == 2


def test_tokenizer_json_is_read_also_where_mistral_common_is_installed(
    tmp_path: Path, their_library: Path
) -> None:
    folder = published(tmp_path, TEKKEN, "tekken.json")
    for path in artefact("qwen3").iterdir():
        shutil.copy(path, folder / path.name)
    code = f"""
import json
from models.text.tokenizer import load_tokenizer
tokenizer = load_tokenizer({str(folder)!r})
print(json.dumps([tokenizer.encode("Hello world"), sorted(tokenizer.special_tokens)]))
"""
    ids, special = in_a_process_with(their_library, code)
    assert ids == load_tokenizer(artefact("qwen3")).encode("Hello world")
    assert "<|im_end|>" in special


def test_a_sentencepiece_model_gives_the_ids_of_its_own_library(tmp_path: Path, their_library: Path) -> None:
    folder = published(tmp_path, SENTENCE_PIECE, "tokenizer.model")
    ours, theirs = in_a_process_with(
        their_library,
        f"""
import json, sentencepiece
from models.text.tokenizer import load_tokenizer
tokenizer, texts = load_tokenizer({str(folder)!r}), {TEXTS[:1]!r}
reference = sentencepiece.SentencePieceProcessor(model_file={str(folder / "tokenizer.model")!r})
ours = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
print(json.dumps([ours, [reference.encode(text) for text in texts]]))
""",
    )
    assert ours == theirs


@pytest.mark.parametrize(
    ("file", "name", "package"),
    [(TEKKEN, "tekken.json", "mistral-common"), (SENTENCE_PIECE, "tokenizer.model", "sentencepiece")],
)
def test_a_missing_package_is_named(file: str, name: str, package: str, tmp_path: Path) -> None:
    if find_spec(package.replace("-", "_")):
        pytest.skip(f"{package} is installed here")
    with pytest.raises(ConfigError, match=f"{name} without tokenizer.json needs the package {package}: pip"):
        load_tokenizer(published(tmp_path, file, name))


@pytest.mark.parametrize(("version", "is_mended"), [("4.45.0", True), ("5.0.0", False)])
def test_a_wrong_split_of_words_is_mended_where_transformers_4_wrote_it(
    version: str, is_mended: bool, tmp_path: Path
) -> None:
    for path in artefact("qwen3").iterdir():
        shutil.copy(path, tmp_path / path.name)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "transformers_version": version}))
    right = Fast.from_file(str(tmp_path / "tokenizer.json"))
    assert isinstance(right.pre_tokenizer, pre_tokenizers.Sequence)
    # Qwen's pattern splits a word of mixed case otherwise than Mistral's.
    found = load_tokenizer(tmp_path).encode("HTTPServer iPhone", add_special_tokens=False)
    assert (found != right.encode("HTTPServer iPhone", add_special_tokens=False).ids) == is_mended
