"""What is asked for and not there is refused in one sentence; where there is a GPU, it says what a CPU says."""

from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch

from baton import LLM, SamplingParams
from core.config.cluster_config import EngineConfig
from core.errors import ConfigError
from device import cuda
from engine.execution.graphs import make_graphs as graphs_made
from engine.execution.graphs.graph_capture import again, cuda_capture
from engine.execution.graphs.graph_sizes import GraphSizes
from engine.execution.graphs.make_graphs import make_graphs, why_no_graphs
from engine.execution.pools.resident_pool import ResidentPool
from engine.sizing.devices import bound_allocations, card_of, choose_device
from kernels.attention.case import Case
from kernels.select import Kernels, select_ops
from kernels.torch.reference import reference_ops

PROMPTS = ["def fibonacci(n):\n", "import os\n\n\nclass Path", "for i in range("]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="no CUDA device"):
        choose_device("cuda")


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_a_gpu_without_cupy_is_refused_before_anything_is_loaded(
    wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "has_cupy", lambda: False)
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(
        ConfigError, match="through cupy, which is not installed: pip install .* engine.device to cpu"
    ):
        choose_device(wanted)
    monkeypatch.setattr(cuda, "has_cupy", lambda: True)
    assert choose_device(wanted) == torch.device("cuda", 0)


def test_a_process_on_a_shared_card_runs_out_of_memory_at_its_own_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bounds: list[float] = []
    card = Mock(uuid="GPU-1", multi_processor_count=52, total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: bounds.append(share)
    )
    assert card_of(torch.device("cuda", 0)) == ("GPU-1", 52)
    for num_bytes in (20 << 30, -1, 90 << 30):
        bound_allocations(torch.device("cuda", 0), num_bytes)
    assert bounds == [0.25, 0, 1]


def test_kernels_that_do_not_run_here_are_refused() -> None:
    for kernels in ("triton", "flashinfer", "flash_attention"):
        with pytest.raises(ConfigError, match=f"{kernels}, whose kernels run on GPUs only"):
            select_ops(torch.device("cpu"), kernels)
    with pytest.raises(ConfigError, match="needs Triton's kernels on a GPU"):
        select_ops(torch.device("cuda"), deterministic=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("kernels", ["flashinfer", "flash_attention"])
def test_attention_that_is_not_installed_is_refused_where_it_is_forced(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    cuda, cases = (
        torch.device("cuda"),
        [Case(num_heads=8, num_kv_heads=2, head_dim=128, block_size=16, dtype=torch.bfloat16, scale=0.1)],
    )
    with pytest.raises(ConfigError, match="not installed: pip install"):
        select_ops(cuda, kernels, cases=cases)
    with pytest.raises(ConfigError, match="engine.deterministic needs Triton"):
        select_ops(cuda, kernels, deterministic=True, cases=cases)
    assert select_ops(cuda, cases=cases).paged_attention is not None


def test_graphs_that_cannot_be_captured_are_refused_where_sizes_are_named() -> None:
    with (
        pytest.raises(
            ConfigError, match=r"engine\.cuda_graphs names sizes, but CUDA graphs are captured on GPUs alone"
        ),
        LLM("embedded", engine__device="cpu", engine__cuda_graphs=[1, 8]),
    ):
        pass


def test_kernels_that_take_lengths_from_the_host_are_not_captured() -> None:
    model = Mock(ops=reference_ops())
    model.spec.recurrent, model.spec.chunks, model.spec.mla, model.spec.compressed = None, (), None, None
    assert why_no_graphs(model, again).startswith("only Triton's kernels")


def test_recurrent_layers_are_not_captured() -> None:
    assert why_no_graphs(Mock(), again) == "recurrent layers cannot be captured"


def test_attention_within_chunks_is_not_captured() -> None:
    model = Mock()
    model.spec.recurrent, model.spec.chunks = None, (8192, 0)
    assert why_no_graphs(model, again).startswith("attention within chunks")


def test_layers_that_choose_tokens_are_not_captured() -> None:
    model = Mock()
    model.spec.recurrent, model.spec.chunks = None, ()
    assert why_no_graphs(model, again).startswith("layers that choose tokens")


def test_layers_with_entries_are_not_captured() -> None:
    model = Mock()
    model.spec.recurrent, model.spec.chunks, model.spec.mla = None, (), None
    assert why_no_graphs(model, again).startswith("layers with entries")


def test_where_a_capture_fails_auto_serves_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    fails = Mock(side_effect=RuntimeError("operation not permitted when stream is capturing"))
    monkeypatch.setattr(graphs_made, "StepGraphs", fails)
    graphs, said = captured(GraphSizes.of(EngineConfig()))
    assert graphs is None
    assert said.endswith("capturing them has failed: operation not permitted when stream is capturing")
    with pytest.raises(RuntimeError, match="not permitted"):
        captured(GraphSizes.of(EngineConfig(cuda_graphs=(1, 8))))


def test_no_rank_replays_where_another_one_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """They meet in each layer, with as many rows as each of them has: a step that one has padded the others must have."""
    monkeypatch.setattr(graphs_made, "StepGraphs", Mock())
    asked, agreed = GraphSizes.of(EngineConfig()), list[bool]()
    assert captured(asked, lambda own: agreed.append(own) or True)[0] is not None
    graphs, said = captured(asked, lambda own: agreed.append(own) or False)
    assert graphs is None
    assert said.endswith("capturing them has failed on another rank")
    assert agreed == [True, True]


def captured(
    asked: GraphSizes, agree: Callable[[bool], bool] = bool
) -> tuple[graphs_made.StepGraphs | None, str]:
    pool, model = Mock(spec=ResidentPool, device=torch.device("cuda")), Mock()
    model.spec.recurrent, model.spec.chunks, model.spec.mla, model.spec.compressed = None, (), None, None
    return make_graphs(model, pool, 16, 1024, asked, again, agree=agree)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_results_of_captures_lie_in_memory_that_they_share() -> None:
    device = torch.device("cuda", 0)
    capture, x = cuda_capture(device), torch.arange(1 << 22, device=device, dtype=torch.bfloat16)
    assert capture is not None
    replays = {size: capture(lambda size=size: x[:size] + size) for size in (1 << 22, 1 << 21, 1 << 20)}
    for _ in range(2):
        for size, replay in replays.items():
            assert torch.equal(replay(), x[:size] + size)
    assert len({replay().data_ptr() for replay in replays.values()}) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3}])
def test_captured_steps_say_what_launched_ones_say(sampling: dict[str, float], deterministic: bool) -> None:
    """Three sequences in graphs of four rows, then one."""
    params = SamplingParams(max_tokens=48, **sampling)  # type: ignore[arg-type]
    texts: list[list[str]] = []
    for sizes in ("none", [1, 2, 4]):
        with LLM(
            "embedded",
            model__dtype="float32",
            engine__kernels="triton",
            engine__cuda_graphs=sizes,
            engine__deterministic=deterministic,
        ) as llm:
            several = [answer.text for answer in llm.generate(PROMPTS, params)]
            texts.append([*several, llm.generate(PROMPTS[:1], params)[0].text])
    assert texts[0] == texts[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}])
def test_a_gpu_says_what_a_cpu_says(kernels: str, sampling: dict[str, float]) -> None:
    params = SamplingParams(max_tokens=48, **sampling)  # type: ignore[arg-type]
    texts: list[list[str]] = []
    for device in ("cpu", "cuda"):
        choice = {"engine__kernels": kernels} if device == "cuda" else {}
        with LLM("embedded", model__dtype="float32", engine__device=device, **choice) as llm:  # type: ignore[arg-type]
            texts.append([answer.text for answer in llm.generate(PROMPTS, params)])
    assert texts[0] == texts[1]
