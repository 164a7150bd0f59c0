"""Reads transformers' causal models, and takes their heads apart from their layers."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from core.errors import UnsupportedModel
from models.formats.float_weights import float_weights
from models.spec.model_spec import ModelSpec, read_json
from models.spec.quantisation_config import read_quantisation

CHECKED: Final = (("a", 0, 5), ("b", 0, 3), ("a", 5, 4), ("b", 3, 1))
"""(sequence, first token, tokens) of each chunk. The comparison computes them two by two."""


@dataclass
class _Behind(BaseModelOutputWithPastAndCrossAttentions):
    """What layers return, with fields that only some of them have."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class Given(nn.Module):
    """Takes the place of the layers where only what comes behind them is to be computed."""

    hidden: Tensor

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self._others = (base,)  # no part of this one
        """What is asked for beside the layers' result."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_others"][0], name)

    @property
    def decoder(self) -> "Given":
        """The decoder under the name that some heads use, which is one level deeper."""
        return self

    def forward(self, *_: Any, **__: Any) -> _Behind:
        return _Behind(last_hidden_state=self.hidden)  # type: ignore[arg-type]


def load_causal(folder: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Any:
    """Load transformers' causal model with its weights. Raises UnsupportedModel."""
    kind: Any = getattr(transformers, spec.architecture)
    try:
        model, report = kind.from_pretrained(
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
            **_source(folder, dtype),
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UnsupportedModel(f"transformers cannot load {folder}: {error}") from None
    if missing := sorted(report["missing_keys"]):
        raise UnsupportedModel(f"the checkpoint in {folder} lacks {', '.join(missing[:3])}")
    return model.to(device).eval()


def _source(folder: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Return where transformers is to take weights from: the folder, or floats that are made of it. Raises UnsupportedModel."""
    written = read_json(folder / "config.json")
    if (how := read_quantisation(written)) is None:
        return {
            "pretrained_model_name_or_path": folder, "local_files_only": True, "use_safetensors": True
        }  # fmt: skip
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    for part in (config, config.get_text_config()):
        part.quantization_config = None
    state = float_weights(folder, how, dtype)
    return {"pretrained_model_name_or_path": None, "config": config, "state_dict": state}


def with_given(causal: Any, given: Given) -> Any:
    """Return the causal model with `given` in place of its layers: its head, and all that it does with logits, without a second
    copy."""
    head = copy(causal)
    head._modules = {**causal._modules, causal.base_model_prefix: given}
    return head


@dataclass(frozen=True, slots=True)
class Example:
    """A sequence, and what transformers itself computes of it."""

    given: Tensor
    """Tokens (T,), or hidden (T, hidden_size) from the stage before."""
    made: Tensor
    """Logits (T, vocab_size), or hidden (T, hidden_size) for the next stage."""


def examples_of(causal: Any, spec: ModelSpec, layers: range) -> Mapping[str, Example]:
    """Let transformers compute two sequences, wherever the model lies."""
    rng = torch.Generator().manual_seed(0)
    found: dict[str, Example] = {}
    is_stage = len(layers) < spec.num_layers
    for key in "ab":
        length = max(start + count for other, start, count in CHECKED if other == key)
        tokens = torch.randint(spec.vocab_size, (length,), generator=rng).to(causal.device)
        out = causal(input_ids=tokens[None], use_cache=False, output_hidden_states=is_stage)
        found[key] = Example(
            out.hidden_states[layers.start][0] if layers.start else tokens,
            out.hidden_states[layers.stop][0] if layers.stop < spec.num_layers else out.logits[0],
        )
    return found


class Reached:
    """Which modules are called for a text. Towers for images and sounds are not among them."""

    def __init__(self, causal: Any) -> None:
        """Note what is called from now on."""
        self._causal = causal
        self._seen = set[nn.Module]()
        self._hooks = [module.register_forward_pre_hook(self._see) for module in causal.modules()]

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def only_read(self) -> set[nn.Module]:
        """Return the modules that are not called where what they are in is: their numbers are read."""
        return {part for owner in self._seen for part in owner.children() if part not in self._seen}

    def drop_others(self) -> None:
        """Remove what no text reaches from a model that is made of several."""
        config = self._causal.config
        if config.get_text_config() is config:
            return
        for owner in (self._causal, self._causal.base_model):
            for name, part in list(owner.named_children()):
                if not any(module in self._seen for module in part.modules()):
                    setattr(owner, name, None)

    def _see(self, module: nn.Module, args: Any) -> None:
        del args
        self._seen.add(module)
