"""What attention's kernels are chosen for is what the model's layers call them with."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.attention.case import Attend, Backend, Case
from kernels.attention.choosing import Chooser
from kernels.attention.flash_attention import FlashAttention
from kernels.attention.flashinfer import FlashInferAttention
from kernels.attention.remembered import ChoiceFile
from kernels.attention.selecting import select_attention
from kernels.attention.trial import device_timer
from kernels.kv_parts import KVPart
from kernels.torch.reference import reference_ops
from models import registry
from models.families.table import read_spec
from models.layers.attention_cases import attention_cases
from models.registry import LoadOptions, load_model
from tests.kernels import attention_stubs
from tests.models.checkpoints import BLOCK, CPU, FAMILIES, Paged, make
from tests.models.parts import tensor_parallel


@pytest.mark.parametrize("family", FAMILIES)
def test_cases_are_the_calls(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, FAMILIES[family](random.Random(3), 0), seed=1)
    said: list[Case] = []
    called: set[Case] = set()

    def select_ops(
        device: torch.device, wanted: str, cases: tuple[Case, ...], *_: str, deterministic: bool
    ) -> Any:
        said.extend(cases)
        ops = reference_ops()

        def attend(q: Any, kv_layer: Any, meta: Any, *how: Any) -> torch.Tensor:
            scale, window, soft_cap, sinks = how
            if isinstance(kv_layer, KVPart):  # which is read by Baton's own kernels alone
                return ops.paged_attention(q, kv_layer, meta, *how)
            kv_heads, block_size = kv_layer.shape[2:4]
            called.add(
                Case(
                    num_heads=q.shape[1],
                    num_kv_heads=kv_heads,
                    head_dim=q.shape[2],
                    block_size=block_size,
                    dtype=q.dtype,
                    scale=scale,
                    window=window,
                    soft_cap=soft_cap,
                    sinks=sinks is not None,
                )
            )
            return ops.paged_attention(q, kv_layer, meta, *how)

        return replace(ops, paged_attention=attend)

    monkeypatch.setattr(registry, "select_ops", select_ops)
    model = load_model(tmp_path, "float32", CPU, options=LoadOptions(block_size=BLOCK))
    Paged(model, 1, random.Random(0)).step([(0, 0, list(range(2, 9)))])
    assert called == set(said)
    assert len(said) == len(set(said))
    assert bool(said) == (model.spec.mla is None and family != "gemma4_small")


BACKENDS: dict[str, Callable[[], Attend]] = {
    "flashinfer": lambda: FlashInferAttention(attention_stubs),
    "flash_attention": lambda: FlashAttention(attention_stubs),
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_a_model_over_another_backend_says_what_transformers_says(
    family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = make(tmp_path, FAMILIES[family](random.Random(3), 0), seed=1)
    lens = {"decode": [(1, 9), (1, 3)], "prefill": [(5, 7), (1, 2)]}
    chooser = Chooser(CPU, "", ChoiceFile(tmp_path / "choices.json"), device_timer(CPU), lens)  # type: ignore[arg-type]

    def select_ops(
        device: torch.device, wanted: str, cases: tuple[Case, ...], *_: str, deterministic: bool
    ) -> Any:
        ops, backend = reference_ops(), Backend(name, BACKENDS[name]())
        current = Backend("torch", ops.paged_attention)
        attention = select_attention(name, cases, current, chooser, lambda _: backend)
        return replace(ops, paged_attention=attention)

    monkeypatch.setattr(registry, "select_ops", select_ops)
    paged = Paged(
        load_model(tmp_path, "float32", CPU, options=LoadOptions(block_size=BLOCK)), 2, random.Random(0)
    )
    prompt, other = list(range(2, 40)), list(range(40, 50))
    mixed = [(0, 20, prompt[20:37]), (1, 0, other[:9])]
    rows = [
        paged.step(step) for step in ([(0, 0, prompt[:20])], mixed, [(0, 37, prompt[37:]), (1, 9, other[9:])])
    ]
    with torch.inference_mode():
        want = [reference(torch.tensor([tokens])).logits[0] for tokens in (prompt, other)]
    got = [torch.cat([rows[0][0], rows[1][0], rows[2][0]]), torch.cat([rows[1][1], rows[2][1]])]
    for one, expected in zip(got, want, strict=True):
        torch.testing.assert_close(one, expected, atol=2e-4, rtol=2e-4)


def test_a_rank_asks_for_its_own_heads(tmp_path: Path) -> None:
    make(tmp_path, FAMILIES["gemma2"](random.Random(0), 0), seed=1)
    spec = replace(read_spec(tmp_path), num_heads=8, num_kv_heads=2)
    (case, *_) = attention_cases(
        spec, tensor_parallel(1, 2, False), range(1, spec.num_layers), torch.bfloat16, 16
    )
    assert (case.num_heads, case.num_kv_heads, case.block_size) == (4, 1, 16)
