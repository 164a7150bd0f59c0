"""What Baton gives FlashInfer and FlashAttention is what they document: stand-ins that read it so give the definition's result."""

import inspect
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu.peers import paged
from kernels.attention import flash_attention, flashinfer
from kernels.attention.case import Attend, Case
from kernels.attention.choosing import Chooser
from kernels.attention.installed import INSTALL, load_backend
from kernels.attention.remembered import ChoiceFile
from kernels.attention.trial import device_timer
from kernels.ops import AttentionMeta
from tests.kernels import attention_stubs as stubs
from tests.kernels.paged_step import expected, make_step

MAKERS: dict[str, Callable[[], Attend]] = {
    "flashinfer": lambda: flashinfer.FlashInferAttention(stubs),
    "flash_attention": lambda: flash_attention.FlashAttention(stubs),
}
LENS = {
    "decode": [(1, 70), (1, 1), (1, 33), (1, 16)],
    "mixed": [(1, 70), (5, 18), (1, 1), (17, 57), (3, 3), (16, 32)],
    "prefill": [(40, 40), (8, 64)],
}


@pytest.fixture(params=MAKERS)
def attend(request: pytest.FixtureRequest) -> Attend:
    return MAKERS[request.param]()


@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (7, 0.0), (1, 2.0), (1000, 30.0)])
@pytest.mark.parametrize("heads", [(6, 2), (1, 1), (3, 3), (8, 1)])
@pytest.mark.parametrize("kind", LENS)
def test_a_step_is_attended_as_defined(
    attend: Attend, kind: str, heads: tuple[int, int], window: int, soft_cap: float
) -> None:
    rng = random.Random(f"{kind}{heads}{window}")
    step = make_step(LENS[kind], heads=heads, block_size=rng.choice((1, 4, 16)), head_dim=16)
    got = attend(step.q, step.kv_layer, step.meta, 0.7, window, soft_cap, None)
    torch.testing.assert_close(got.double(), expected(step, 0.7, window, soft_cap), atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", LENS)
def test_blocks_that_are_reserved_beyond_the_context_are_not_attended(attend: Attend, kind: str) -> None:
    step = make_step(LENS[kind], head_dim=16)
    tables = [np.append(table.numpy(), [0, 0, 0][:i]) for i, table in enumerate(step.meta.block_tables)]
    lens = step.meta.query_lens, step.meta.context_lens
    meta = AttentionMeta.build(*lens, tables, step.meta.slots.numpy(), step.q.device)
    got = attend(step.q, step.kv_layer, meta, 0.7, 0, 0.0, None)
    torch.testing.assert_close(got.double(), expected(step, 0.7, 0, 0.0), atol=4e-6, rtol=1e-5)


def test_the_pool_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(LENS["decode"])
    seen: list[int] = []
    monkeypatch.setattr(
        stubs, "_read_cache", lambda k, v, *_: seen.extend(x.untyped_storage().data_ptr() for x in (k, v)) or (k[0], v[0])
    )  # fmt: skip
    MAKERS["flash_attention"]()(step.q, step.kv_layer, step.meta, 0.7, 0, 0.0, None)
    assert set(seen) == {step.kv_layer.untyped_storage().data_ptr()}


def test_a_step_is_planned_once_for_all_layers_and_again_when_another_came_between() -> None:
    attend = MAKERS["flashinfer"]()
    steps = [make_step(LENS["decode"], seed=seed) for seed in (0, 1)]
    before = stubs.BatchDecodeWithPagedKVCacheWrapper.plans
    for which in (0, 0, 0, 1, 0):
        step = steps[which]
        got = attend(step.q, step.kv_layer, step.meta, 0.7, 0, 0.0, None)
        torch.testing.assert_close(got.double(), expected(step, 0.7, 0, 0.0), atol=4e-6, rtol=1e-5)
    assert stubs.BatchDecodeWithPagedKVCacheWrapper.plans - before == 3


def test_layers_of_another_window_keep_their_own_plan() -> None:
    attend, step = MAKERS["flashinfer"](), make_step(LENS["mixed"])
    for window in (0, 5, 0, 5):
        got = attend(step.q, step.kv_layer, step.meta, 0.7, window, 0.0, None)
        torch.testing.assert_close(got.double(), expected(step, 0.7, window, 0.0), atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize("name", stubs.PUBLISHED)
def test_the_stand_ins_have_the_published_signatures(name: str) -> None:
    target: object = stubs
    for part in name.split(" ")[2].split("."):
        target = getattr(target, part)
    assert str(inspect.signature(target)).strip("()") == stubs.PUBLISHED[name].strip("()")  # type: ignore[arg-type]


GOOD = Case(
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    block_size=256,
    dtype=torch.bfloat16,
    scale=0.1,
    window=4096,
    soft_cap=30.0,
)


@pytest.mark.parametrize(
    ("change", "by_flashinfer", "by_flash_attention"),
    [
        ({}, "", ""),
        ({"dtype": torch.float32}, "not in float32", "not in float32"),
        ({"head_dim": 96}, "not of 96", ""),
        ({"head_dim": 264}, "not of 264", "not of 264"),
        ({"sinks": True}, "no sinks", "no sinks"),
        ({"block_size": 16}, "", "engine.block_size is 16"),
    ],
)
def test_what_they_cannot_is_said(
    change: dict[str, object], by_flashinfer: str, by_flash_attention: str
) -> None:
    sizes = {name: getattr(GOOD, name) for name in GOOD.__slots__}
    case = Case(**{**sizes, **change})  # type: ignore[arg-type]
    for said, why in (
        (flashinfer.unable(case), by_flashinfer),
        (flash_attention.unable(case), by_flash_attention),
    ):
        assert why in said
        assert bool(why) == bool(said)


def test_the_benchmark_runs_them_over_blocks_that_they_can() -> None:
    made = {
        "flashinfer": flashinfer.flashinfer_backend(stubs),
        "flash_attention": flash_attention.flash_attention_backend(stubs),
    }
    case = Case(num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float16, scale=0.125)
    peers = paged(case, [(1, 300), (2, 20)], torch.device("cpu"), made.get)
    assert list(peers) == ["flashinfer, blocks of 16", "flash_attention, blocks of 256"]
    for run in peers.values():
        assert isinstance(out := run(), torch.Tensor)
        assert out.isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", INSTALL)
@pytest.mark.parametrize("window", [0, 700])
def test_the_real_ones_agree_with_the_reference(name: str, window: int, tmp_path: Path) -> None:
    if (backend := load_backend(name)) is None:
        pytest.skip(f"{name} is not installed")
    device = torch.device("cuda")
    chooser = Chooser(device, "", ChoiceFile(tmp_path / "choices.json"), device_timer(device))
    chooser.force(
        [
            Case(
                num_heads=32,
                num_kv_heads=8,
                head_dim=128,
                block_size=256,
                dtype=torch.bfloat16,
                scale=128**-0.5,
                window=window,
            )
        ],
        backend,
    )
