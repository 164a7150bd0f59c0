"""What an adapter asks for and no layer does is refused by name, before a weight of the model is read."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import ConfigError
from models.families.table import read_spec
from models.lora.adapter import read_adapters
from tests.models.checkpoints import FAMILIES, HYBRID, make
from tests.models.peft_adapters import make_adapter

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, without its weights, and an adapter."""
    folder = tmp_path_factory.mktemp("refused")
    reference = make(folder, FAMILIES["llama"](random.Random(0), 0), seed=0)
    make_adapter(folder / "one", reference, 0)
    (folder / "model.safetensors").unlink()
    return folder


def refused(folder: Path, adapter: Path, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        read_adapters({"mine": str(adapter)}, read_spec(folder))
    assert "'mine'" in str(caught.value)


def changed(folder: Path, to: Path, **fields: Any) -> Path:
    """Copy the adapter with other fields in its configuration."""
    to.mkdir()
    config = json.loads((folder / "one" / "adapter_config.json").read_text()) | fields
    (to / "adapter_config.json").write_text(json.dumps(config))
    (to / "adapter_model.safetensors").write_bytes(
        (folder / "one" / "adapter_model.safetensors").read_bytes()
    )
    return to


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type 'IA3'"),
    ({"use_dora": True}, "use_dora"),
    ({"bias": "lora_only"}, "bias 'lora_only'"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ({"layer_replication": [[0, 1]]}, "layer_replication"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
    ({"something_of_tomorrow": 3}, "something_of_tomorrow: 3"),
    ({"r": 0}, "r: "),
    ({"r": 5}, r"is \(4, .*ask for \(5, "),
]


@pytest.mark.parametrize(("fields", "said"), FIELDS)
def test_fields_of_its_configuration(folder: Path, fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    refused(folder, changed(folder, tmp_path / "other", **fields), said)


def test_every_field_that_peft_knows_has_an_answer(folder: Path) -> None:
    """PEFT's defaults are no reason to refuse, and fields that mean nothing to who serves are known by name."""
    config = json.loads((folder / "one" / "adapter_config.json").read_text())
    assert set(peft.LoraConfig().to_dict()) - {"runtime_config"} <= set(config), "PEFT writes all of them"
    assert len(read_adapters({"mine": str(folder / "one")}, read_spec(folder))) == 1


def test_a_folder_that_peft_has_not_written(folder: Path, tmp_path: Path) -> None:
    refused(folder, tmp_path / "nowhere", "no folder")
    refused(folder, tmp_path, "has no adapter_config.json")
    other = changed(folder, tmp_path / "other")
    (other / "adapter_model.safetensors").unlink()
    refused(folder, other, "adapter_model.safetensors")


def test_tensors_that_no_layer_has_a_place_for(folder: Path, tmp_path: Path) -> None:
    other = changed(folder, tmp_path / "other")
    file = other / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "base_model.model.lm_head.lora_A.weight": torch.zeros(4, 8)}, file)
    refused(folder, other, r"lm_head\.lora_A\.weight.*q_proj")
    save_file(
        {**tensors, "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": torch.zeros(4)},
        file,
    )
    refused(folder, other, "lora_magnitude_vector")
    without_b = {
        name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up_proj.lora_B" not in name
    }
    save_file(without_b, file)
    refused(folder, other, r"lacks lora_B of model\.layers\.1\.mlp\.up_proj")


def test_matrices_of_another_model(folder: Path, tmp_path: Path) -> None:
    config = FAMILIES["llama"](random.Random(0), 0)
    config.intermediate_size += 4
    make_adapter(tmp_path / "one", make(tmp_path, config, seed=0), 0)
    refused(folder, tmp_path / "one", "the model and the adapter's rank ask for")


def test_experts(tmp_path: Path) -> None:
    reference = make(tmp_path, FAMILIES["qwen2_moe"](random.Random(0), 0), seed=0)
    make_adapter(tmp_path / "one", reference, 0, targets=r".*\.(q_proj|shared_expert\.up_proj)")
    refused(tmp_path, tmp_path / "one", r"shared_expert\.up_proj.*none of a mixture's experts")


@pytest.mark.parametrize("family", ["deepseek_v2", *HYBRID])
def test_layers_of_other_kinds(family: str, tmp_path: Path) -> None:
    """Their names in the checkpoint are other modules, or are not all of what the layer is."""
    make(tmp_path, {**FAMILIES, **HYBRID}[family](random.Random(1), 0), seed=0)
    module = "self_attn.o_proj" if family != "granite_hybrid" else "mamba.in_proj"
    other = tmp_path / "one"
    other.mkdir()
    (other / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    save_file(
        {f"base_model.model.model.layers.0.{module}.lora_A.weight": torch.zeros(2, 8)},
        other / "adapter_model.safetensors",
    )
    refused_as(tmp_path, other)


def refused_as(folder: Path, adapter: Path) -> None:
    with pytest.raises(ConfigError, match="not supported"):
        read_adapters({"mine": str(adapter)}, read_spec(folder))


def test_a_model_that_transformers_computes(folder: Path) -> None:
    with pytest.raises(ConfigError, match="where transformers computes the layers"):
        read_adapters({"mine": str(folder / "one")}, read_spec(folder, "transformers"))


def test_a_process_without_torch_reads_its_description(folder: Path) -> None:
    """As an ingress does, which keeps torch out."""
    code = (
        "import sys; sys.modules['torch'] = None; from pathlib import Path; from models.families.table import read_spec; "
        "from models.lora.adapter import read_adapters; "
        "print(read_adapters({'mine': sys.argv[2]}, read_spec(Path(sys.argv[1])))[0].key)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(folder / "one")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mine@")
