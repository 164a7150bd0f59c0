"""OpenVINO GenAI: the continuous batching pipeline, which its servers run, step by step. Exported by optimum-intel."""

import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cpu.peers import SLACK, Loaded, Stamp, now, steps_together

genai: Any = import_module("openvino_genai")
openvino: Any = import_module("openvino")
_WEIGHTS = {16: "fp16", 8: "int8", 4: "int4"}


def prepare(checkpoint: Path, target: Path, bits: int) -> None:
    command = (Path(sys.prefix) / "bin" / "optimum-cli", "export", "openvino", "--model", checkpoint)
    options = ("--task", "text-generation-with-past", "--weight-format", _WEIGHTS[bits])
    subprocess.run([*map(str, command), *options, str(target)], check=True)


def load(checkpoint: Path, target: Path, bits: int, threads: int) -> Loaded:
    schedule = genai.SchedulerConfig()
    schedule.cache_size = 1
    schedule.max_num_batched_tokens = 2048
    pipeline = genai.ContinuousBatchingPipeline(
        str(target), schedule, "CPU", {"INFERENCE_NUM_THREADS": threads}, {}, {}
    )
    core = openvino.Core()
    computes = core.get_property("CPU", "INFERENCE_PRECISION_HINT").to_string()
    return Loaded(Engine(pipeline), f"{_WEIGHTS[bits]}, computed in {computes}", version("openvino-genai"))


class Engine:
    def __init__(self, pipeline: Any) -> None:
        self._pipeline, self._count = pipeline, 0

    def prefill(self, prompt: list[int]) -> tuple[Stamp, Stamp]:
        start = now()
        handle = self._add(prompt, 1)
        while not handle.can_read():
            self._pipeline.step()
        end = now()
        self._drop([handle])
        return start, end

    def decode(self, prompts: list[list[int]], steps: int) -> list[Stamp]:
        handles = [self._add(prompt, steps + SLACK) for prompt in prompts]
        begun: set[int] = set()

        def advance() -> int:
            self._pipeline.step()
            for row, handle in enumerate(handles):
                if handle.can_read():
                    handle.read()
                    begun.add(row)
            return len(begun)

        stamps = steps_together(advance, len(prompts), steps)
        self._drop(handles)
        return stamps

    def _add(self, prompt: list[int], count: int) -> Any:
        self._count += 1
        config = genai.GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False)
        return self._pipeline.add_request(self._count, openvino.Tensor(np.array([prompt], np.int64)), config)

    def _drop(self, handles: list[Any]) -> None:
        for handle in handles:
            handle.cancel()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
