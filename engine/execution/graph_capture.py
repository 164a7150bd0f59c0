"""Captures the launches of a step once and replays them: as a CUDA graph or, without a GPU, by launching them again."""

from collections.abc import Callable

import torch
from torch import Tensor

Launch = Callable[[], Tensor]
Capture = Callable[[Launch], Launch]
"""Takes launches that always read and write the same memory, and returns what repeats them. All results are one tensor."""

CaptureOn = Callable[[torch.device], Capture | None]
_WARM_UPS = 2
"""Launches made before a capture, during which nothing may be compiled, chosen or allocated for good."""


class CudaCapture:
    """Captures CUDA graphs that share their scratch memory. One of them may be replayed at a time, on one stream.

    NCCL's collectives are launched on streams of their own, which join the capture by the events between them and this one. So
    ranks that meet in their launches must capture the same ones in the same order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, launch: Launch) -> Launch:
        own = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(own)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                launch()
        own.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._memory, self._stream, capture_error_mode="thread_local"):
            out = launch()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


def cuda_capture(device: torch.device) -> Capture | None:
    """Return what captures on a device of this process. None: nothing can be captured there."""
    return CudaCapture(device) if device.type == "cuda" else None


def again(launch: Launch) -> Launch:
    """A `Capture` without a GPU. What a step wrongly remembers from its capture is wrong here, too, so tests find it."""
    launch()
    return launch
