"""Which device an instance computes on."""

import torch

from core.errors import ConfigError


def choose_device(wanted: str) -> torch.device:
    """`auto`: the first CUDA device, or the CPU without one. Raises ConfigError where there is none that is asked for."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "engine.device is cuda, but torch sees no CUDA device here: install a CUDA build of torch and give the instance a GPU"
        )
    return torch.device("cuda", 0)
