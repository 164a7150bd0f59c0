"""Random adapters that PEFT has written, and PEFT's own model with each: the truth that ours are compared with."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
"""What Phi-3 has in their place."""


def make_adapter(
    folder: Path,
    reference: Any,
    seed: int,
    *,
    rank: int = 4,
    targets: Sequence[str] | str = LINEAR,
    **more: Any,
) -> Any:
    """Write an adapter to `folder`, and return `reference` with it as PEFT reads it back."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=rank,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
        **more,
    )
    model = peft.get_peft_model(copy.deepcopy(reference), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * (0.8 / parameter.shape[-1] ** 0.5))
    model.save_pretrained(str(folder))
    return peft.PeftModel.from_pretrained(copy.deepcopy(reference), str(folder)).eval()
