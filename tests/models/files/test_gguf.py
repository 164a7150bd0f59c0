"""A GGUF file is the model that transformers reads in it, and stays as small."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from core.errors import ConfigError, UnsupportedModel
from kernels.cpu.library import native
from kernels.cpu.linear import Layout
from kernels.cpu.prepacked import prepacked_ops
from models.families.table import read_spec
from models.files.gguf_reader import BYTES
from models.files.hub import resolve
from models.formats.checkpoint import Checkpoint
from models.registry import load_model
from models.text.tokenizer import Tokenizer
from tests.models.checkpoints import CPU, Paged
from tests.models.formats.test_cpu_stored import Watched, load, logits, panels_of
from tests.models.gguf_files import write_gguf
from tests.resident import SMAPS, resident_bytes

PROMPT = list(range(2, 30))
ROOT = Path(__file__).parents[3]
KINDS = [
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ2_XXS",
    "IQ4_XS",
    "MXFP4",
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native()  # The library stays where it is.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def transformers_logits(path: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0]


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("family", "kind"), [*(("llama", kind) for kind in KINDS), ("qwen2", "Q8_0"), ("qwen3", "Q4_0")]
)
def test_logits_are_those_of_transformers(family: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    # transformers does not read the size of Qwen3's heads: it takes its default, 128.
    write_gguf(path, family, kind, {"head_dim": 128} if family == "qwen3" else {})
    got = Paged(load_model(resolve(str(path)), "float32", CPU), 1, random.Random(0)).step([(0, 0, PROMPT)])[0]
    want = transformers_logits(path)
    assert want.std() > 0.01
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_every_type_that_gguf_makes_floats_of_is_read() -> None:
    read = set(BYTES)
    for kind in gguf.GGMLQuantizationType:
        _, size = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            assert kind.name not in read
        else:
            assert kind.name in read


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "scaling", [{"rope_type": "yarn", "original_max_position_embeddings": 16}, {"rope_type": "linear"}]
)
def test_scaled_contexts_are_those_of_the_checkpoint(scaling: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    rope = {"rope_theta": 10000.0, "factor": 4.0, **scaling}
    write_gguf(path, "llama", "F32", {"rope_parameters": rope, "max_position_embeddings": 16})
    folder = resolve(str(path))
    assert read_spec(folder).max_context_tokens == 64
    got = Paged(load_model(folder, "float32", CPU), 1, random.Random(0)).step([(0, 0, PROMPT)])[0]
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model-plain", dtype=torch.float32)
    with torch.inference_mode():
        want = plain(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(native() is None, reason="there are no native kernels here")
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *((kind, Layout.INT4) for kind in ("Q4_0", "Q4_1", "Q4_K", "Q3_K", "Q2_K", "TQ2_0")),
        *((kind, Layout.INT8) for kind in ("Q8_0", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ2_XS", "MXFP4")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("tied", [False, True])
def test_blocks_are_multiplied_as_they_are_stored(
    kind: str, layout: Layout, tied: bool, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen3", kind, {"tie_word_embeddings": tied})
    folder, watched = resolve(str(path)), Watched()
    logits(load(folder, watched.ops)[0])
    assert watched.num_products == 9  # The head, too.
    assert watched.worst < 3e-6
    made = panels_of(folder, prepacked_ops("half"))
    assert {panels.layout for panels in made} == {layout}
    numbers = sum(-(-panels.outputs // 32) * 32 * panels.inputs for panels in made)
    assert sum(panels.data.nbytes for panels in made) == pytest.approx(numbers * BYTES[kind], rel=1e-3)


@pytest.mark.turns(3)
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q3_K", "IQ4_XS"])
def test_small_weights_lose_little(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", kind)
    folder = resolve(str(path))
    got = logits(load(folder, prepacked_ops("half"))[0])
    assert torch.nn.functional.cosine_similarity(got, transformers_logits(path)).min() > 0.995


@pytest.mark.skipif(native() is None, reason="there are no native kernels here")
def test_a_file_of_several_types_stays_small(tmp_path: Path) -> None:
    """As llama.cpp's Q4_K_M: queries, keys and values are one matrix, and become 8 bits where values have more than 4."""
    path = tmp_path / "model.gguf"
    names = "blk.1.attn_v.weight", "blk.0.ffn_down.weight", "output.weight"
    write_gguf(path, "llama", "Q4_K", others=dict.fromkeys(names, "Q6_K"))
    folder, watched = resolve(str(path)), Watched()
    got = logits(load(folder, watched.ops)[0])
    assert watched.worst < 3e-6
    assert torch.nn.functional.cosine_similarity(got, transformers_logits(path)).min() > 0.995
    made = [(each.layout, each.group, each.zero_bytes) for each in panels_of(folder, prepacked_ops("half"))]
    four, six = (Layout.INT4, 32, 2), (Layout.INT8, 16, 0)
    layers = [four, four, four, six], [(Layout.INT8, 16, 2), four, four, four]
    assert made == [six, four, *layers[0], *layers[1]]  # The head and the embedding come first.


def test_tokens_and_templates_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen2", "F16", num_tokens=4096)
    folder = resolve(str(path))
    own = Tokenizer(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    text = "def tell(story):\n    return 'two words', 3"
    assert own.encode(text) == theirs.encode(text)
    assert own.decode(own.encode(text)) == text
    said = own.render_chat([{"role": "user", "content": "hello there"}])
    assert own.decode(own.encode(said, add_special_tokens=False)) == "hello there"
    assert read_spec(folder).eos_token_ids == (1, 2)


def test_a_file_is_unpacked_once_and_again_when_it_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen2", "F16")
    first = resolve(str(path))
    assert resolve(str(path)) == first
    write_gguf(path, "qwen2", "Q8_0", {"num_hidden_layers": 1, "layer_types": ["full_attention"]})
    assert read_spec(resolve(str(path))).num_layers == 1


@pytest.mark.skipif(not SMAPS.exists(), reason="this system does not say what a process has of a file")
def test_what_was_read_of_a_file_leaves_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen2", "F16", num_tokens=4096)
    folder = resolve(str(path))
    spec, name = read_spec(folder), "model.embed_tokens.weight"
    shape = spec.vocab_size, spec.hidden_size
    monkeypatch.setattr("models.formats.tensor_files.MOST_MAPPED_BYTES", 1)
    stored = Checkpoint(folder, torch.float32, CPU)
    first = stored.take(name, shape)
    assert resident_bytes(path) < first.nbytes / 8  # the file has half as many
    assert torch.equal(stored.take(name, shape), first)


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", "Q5_1")
    monkeypatch.delitem(BYTES, "Q5_1")
    with pytest.raises(UnsupportedModel, match=r"has the type Q5_1: F32, F16"):
        resolve(str(path))
    write_gguf(path, "llama", "F16", architecture="xverse")
    with pytest.raises(
        UnsupportedModel, match="has the architecture 'xverse': of GGUF llama, mistral3, qwen2"
    ):
        resolve(str(path))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="an incomplete download"):
        resolve(str(path))
    with pytest.raises(ConfigError, match="no model folder or GGUF file"):
        resolve(str(tmp_path / "none.gguf"))


def test_the_factors_of_llama_3_are_those_that_the_file_has(tmp_path: Path) -> None:
    from models.files.gguf_ropes import llama3_factors

    config = transformers.LlamaConfig(
        head_dim=64, hidden_size=256, num_attention_heads=4,
        rope_parameters={"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192, "rope_theta": 500000.0},
    )  # fmt: skip
    rope = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, CPU)[0]
    plain = 500000.0 ** -(torch.arange(0, 64, 2) / 64)
    want = plain / rope
    torch.testing.assert_close(
        torch.tensor(llama3_factors(500000.0, 64, 32.0)).float(), want, rtol=1e-4, atol=0
    )


def test_a_process_without_torch_gets_its_folder(tmp_path: Path) -> None:
    """As an ingress on a machine of its own."""
    write_gguf(tmp_path / "m.gguf", "qwen2", "Q8_0")
    code = "import sys; sys.modules['torch'] = None; from models.files.hub import folder_of; print(folder_of(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "m.gguf")],
        cwd=ROOT,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.strip()) / "tokenizer.json").is_file()
