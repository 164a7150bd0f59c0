"""What is asked for and not there is refused in one sentence; where there is a GPU, it says what a CPU says."""

import pytest
import torch

from baton import LLM, SamplingParams
from core.errors import ConfigError
from engine.devices import choose_device
from kernels.attention.case import Case
from kernels.select import Kernels, select_ops

PROMPTS = ["def fibonacci(n):\n", "import os\n\n\nclass Path", "for i in range("]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="no CUDA device"):
        choose_device("cuda")


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
    cuda, cases = torch.device("cuda"), [Case(8, 2, 128, 16, torch.bfloat16, 0.1)]
    with pytest.raises(ConfigError, match="not installed: pip install"):
        select_ops(cuda, kernels, cases=cases)
    with pytest.raises(ConfigError, match="engine.deterministic needs Triton"):
        select_ops(cuda, kernels, deterministic=True, cases=cases)
    assert select_ops(cuda, cases=cases).paged_attention is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}])
def test_a_gpu_says_what_a_cpu_says(kernels: str, sampling: dict[str, float]) -> None:
    params = SamplingParams(max_tokens=48, **sampling)  # type: ignore[arg-type]
    texts: list[list[str]] = []
    for device in ("cpu", "cuda"):
        choice = {"engine__kernels": kernels} if device == "cuda" else {}
        with LLM("embedded", model__dtype="float32", engine__device=device, **choice) as llm:
            texts.append([answer.text for answer in llm.generate(PROMPTS, params)])
    assert texts[0] == texts[1]
