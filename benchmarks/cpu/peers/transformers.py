"""transformers' own model over its own cache: a loop of calls with argmax, which is less than `generate` does."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.cpu.peers import Loaded, Stamp, Unsupported, now


def load(checkpoint: Path, target: Path, bits: int, threads: int) -> Loaded:
    if bits < 16:
        raise Unsupported("transformers brings no quantised products for CPUs of its own")
    torch.set_num_threads(threads)
    dtype = fast_dtype()
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    return Loaded(Engine(model.eval()), str(dtype).removeprefix("torch."), version("transformers"))


def fast_dtype() -> torch.dtype:
    """bfloat16 where the processor multiplies it; elsewhere PyTorch is several times slower with it than with float32."""
    flags = Path("/proc/cpuinfo").read_text()
    return torch.bfloat16 if "avx512_bf16" in flags or "amx_bf16" in flags else torch.float32


class Engine:
    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> tuple[Stamp, Stamp]:
        start = now()
        self._next(torch.tensor([prompt]), DynamicCache(config=self._model.config)).tolist()
        return start, now()

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], steps: int) -> list[Stamp]:
        cache = DynamicCache(config=self._model.config)
        tokens = self._next(torch.tensor(prompts), cache)
        stamps = [now()]
        for _ in range(steps):
            tokens = self._next(tokens[:, None], cache)
            tokens.tolist()
            stamps.append(now())
        return stamps

    def _next(self, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        return self._model(tokens, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1)
