"""Tiny models whose matrices stay as they are stored, against transformers; of W8A8 formats its linear layers round what they
multiply by the format's own definition."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kernels.ops import Ops
from kernels.packed import EightBit, FourBit, Weight
from kernels.rounding import Activations, Rounded
from kernels.torch.reference import reference_ops
from kernels.triton.ops import triton_ops
from models.families.table import read_spec
from models.formats.checkpoint import Checkpoint, whole
from models.model import Model
from tests.models.checkpoints import Paged
from tests.models.stored import (
    BLOCKS,
    W8A8_WAYS,
    compressed,
    four_bits,
    mxfp4_checkpoint,
    packed_checkpoint,
    packed_parts,
    quantise_all,
    scaled,
    w8a8,
)
from tests.models.stored_scaled import scaled_checkpoint

PROMPT = list(range(2, 11))
Round = Callable[[torch.Tensor], torch.Tensor]


class Seen:
    """`Ops` that remember how weights were stored that they have multiplied with."""

    def __init__(self, ops: Ops) -> None:
        self.kinds: set[type] = set()
        self.rounded: list[bool] = []
        """Whether what it was to multiply weights of 8 bits with had been rounded already."""
        self.ops = replace(ops, linear=self._linear(ops), experts=self._experts(ops))

    def _linear(self, ops: Ops) -> Callable[..., torch.Tensor]:
        def linear(x: Activations, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
            self.kinds.add(type(weight))
            if isinstance(weight, EightBit):
                self.rounded.append(isinstance(x, Rounded))
            return ops.linear(x, weight, bias)

        return linear

    def _experts(self, ops: Ops) -> Callable[..., torch.Tensor]:
        def experts(x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, held: Any, act: Any) -> torch.Tensor:  # fmt: skip
            self.kinds |= {type(held.gate_up), type(held.down)}
            return ops.experts(x, slots, weights, held, act)

        return experts


def load(folder: Path, ops: Ops, device: torch.device) -> Model:
    spec = read_spec(folder)
    checkpoint = Checkpoint(folder, torch.float32, device, whole, spec.quantisation, ops.keeps)
    model = Model(spec, ops, checkpoint, device)
    checkpoint.close()
    return model


def logits(model: Model, device: torch.device) -> torch.Tensor:
    paged = Paged(model, 1, random.Random(0), device=device)
    return torch.cat(
        paged.step([(0, 0, PROMPT[:-1])]) + paged.step([(0, len(PROMPT) - 1, PROMPT[-1:])])
    ).cpu()


def transformers_logits(folder: Path, quantisation: Any, rounding: Round | None) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", quantization_config=quantisation
    ).float()
    for name, module in model.named_modules():
        if rounding is not None and isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, args: (rounding(args[0]), *args[1:]))
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0]


def dequantised() -> Any:
    """Return how transformers is to read such a checkpoint, for which it needs a package that few machines with a GPU have."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    return transformers.CompressedTensorsConfig(dequantize=True)


def rounded(x: torch.Tensor, kind: str, size: int, given: float = 0.0) -> torch.Tensor:
    """Each `size` numbers of a token with one scale, that of the largest, or all with the one that is `given`."""
    parts = x.unflatten(-1, (-1, size or x.shape[-1]))
    largest = 127 if kind == "int" else 448
    scale = given or parts.abs().amax(-1, keepdim=True).clamp_min(1e-12) / largest
    stored = (parts / scale).clamp(-largest, largest)
    stored = stored.round() if kind == "int" else stored.to(torch.float8_e4m3fn).float()
    return (stored * scale).flatten(-2)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize(("kind", "strategy", "given"), W8A8_WAYS)
def test_eight_bits(kind: str, strategy: str, given: float, device: torch.device, tmp_path: Path) -> None:
    """A number between two steps may be rounded to either where sums before it are added up in another order."""
    w8a8(tmp_path, kind, strategy, input_scale=given, **BLOCKS if strategy == "block" else {})
    seen = Seen(triton_ops(device))
    got = logits(load(tmp_path, seen.ops, device), device)
    assert EightBit in seen.kinds
    assert seen.rounded[:4] == [True, False, True, True]  # all but what attention gives out_proj
    if strategy == "channel" and not given:
        later = replace(triton_ops(device), rounds=lambda _: None)
        unfused = logits(load(tmp_path, later, device), device)
        assert cosine(got, unfused) > 0.99999
    size = 128 if strategy == "block" else 0
    want = transformers_logits(tmp_path, dequantised(), lambda x: rounded(x, kind, size, given))
    plain = transformers_logits(tmp_path, dequantised(), None)
    assert cosine(got, want) > 0.9999
    assert (got - want).abs().max() < 0.02 * want.std()
    assert cosine(got, plain) > (0.998 if kind == "int" and not given else 0.97)


def cosine(got: torch.Tensor, want: torch.Tensor) -> float:
    """The least of all positions."""
    return torch.cosine_similarity(got.double(), want.double(), -1).min().item()


def test_experts_of_eight_bits(device: torch.device, tmp_path: Path) -> None:
    """They do not round what they multiply, so that the rest of the layer is all that does."""
    w8a8(tmp_path, "int", "channel", "qwen3_moe", moe_intermediate_size=48)
    seen = Seen(triton_ops(device))
    got = logits(load(tmp_path, seen.ops, device), device)
    assert seen.kinds == {EightBit, torch.Tensor}
    want = logits(load(tmp_path, reference_ops(), device), device)
    assert cosine(got, want) > 0.999


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize("kind", ["awq", "gptq", "packed"])
def test_four_bits(kind: str, device: torch.device, tmp_path: Path) -> None:
    stored, plain = tmp_path / "stored", tmp_path / "plain"
    made = packed_checkpoint(stored, kind, 16)
    seen = Seen(triton_ops(device))
    model = load(stored, seen.ops, device)
    if kind == "packed":
        want = transformers_logits(stored, dequantised(), None)
    else:
        again = iter(made)
        quantise_all(plain, "llama", lambda _: {"weight": four_bits(kind, next(again), 16)})
        want = transformers_logits(plain, None, None)
    got = logits(model, device)
    assert seen.kinds == {FourBit, torch.Tensor}
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert greedy(model, device) == greedy(load(stored, reference_ops(), device), device)


def greedy(model: Model, device: torch.device, count: int = 1) -> list[int]:
    paged, tokens = Paged(model, 1, random.Random(0), device=device), list(PROMPT)
    (rows,) = paged.step([(0, 0, tokens)])
    for _ in range(count):
        tokens.append(int(rows[-1].argmax()))
        (rows,) = paged.step([(0, len(tokens) - 1, tokens[-1:])])
    return tokens[len(PROMPT) :]


def test_mxfp4(device: torch.device, tmp_path: Path) -> None:
    mxfp4_checkpoint(tmp_path)
    seen = Seen(triton_ops(device))
    model = load(tmp_path, seen.ops, device)
    want = transformers_logits(tmp_path, transformers.Mxfp4Config(dequantize=True), None)
    torch.testing.assert_close(logits(model, device), want, atol=1e-4, rtol=1e-4)
    assert FourBit in seen.kinds
    assert greedy(model, device) == greedy(load(tmp_path, reference_ops(), device), device)


@pytest.mark.parametrize("way", ["MXFP4 of compressed-tensors", "NVFP4 of compressed-tensors"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
def test_floats_of_four_bits(way: str, family: str, device: torch.device, tmp_path: Path) -> None:
    experts = {"moe_intermediate_size": 64} if family == "qwen3_moe" else {}
    scaled_checkpoint(tmp_path, way, family, intermediate_size=128, head_dim=16, **experts)
    seen = Seen(triton_ops(device))
    got = logits(load(tmp_path, seen.ops, device), device)
    assert seen.kinds == {FourBit, torch.Tensor}
    want = logits(load(tmp_path, reference_ops(), device), device)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    if family == "llama":
        torch.testing.assert_close(
            got, transformers_logits(tmp_path, dequantised(), None), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("kind", ["activation order", "weights only"])
def test_what_no_kernel_reads_is_made_floats(kind: str, device: torch.device, tmp_path: Path) -> None:
    if kind == "weights only":
        how = compressed(num_bits=8, type="int", strategy="channel")

        def quantise(weight: torch.Tensor) -> dict[str, torch.Tensor]:
            values, scales = scaled(weight, "int", "channel")
            return {"weight": values, "weight_scale": scales}

        quantise_all(tmp_path, "llama", quantise, quantization_config=how)
    else:
        how = {"quant_method": "gptq", "bits": 4, "group_size": 16}
        quantise_all(
            tmp_path, "llama", lambda w: packed_parts("gptq, any order", w, 16), quantization_config=how
        )
    seen = Seen(triton_ops(device))
    got = logits(load(tmp_path, seen.ops, device), device)
    assert seen.kinds == {torch.Tensor}
    torch.testing.assert_close(
        got, logits(load(tmp_path, reference_ops(), device), device), atol=1e-4, rtol=1e-4
    )
