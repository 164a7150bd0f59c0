"""Captures the launches of a step once and replays them: as a CUDA graph or, without a GPU, by launching them again."""

from collections.abc import Callable

import torch
from torch import Tensor

from device.array_interface import CudaBytes

Launch = Callable[[], Tensor]
Capture = Callable[[Launch], Launch]
"""Takes launches that always read and write the same memory, and returns what repeats them. All results are one tensor, which the
next replay of any capture overwrites."""

CaptureOn = Callable[[torch.device], Capture | None]
_WARM_UPS = 2
"""Launches made before a capture, during which nothing may be compiled, chosen or allocated for good."""


class CudaCapture:
    """Captures CUDA graphs that share their memory, scratch and results. One of them may be replayed at a time, on one stream.

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
        # Given up, so that the next captures' results lie in its memory, which is the graphs' for as long as there are any.
        out = _unowned(out)

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


def _unowned(tensor: Tensor) -> Tensor:
    """Return the same memory as a tensor that does not keep it."""
    assert tensor.is_contiguous()
    flat = torch.as_tensor(CudaBytes(tensor.data_ptr(), tensor.nbytes), device=tensor.device)
    return flat.view(tensor.dtype).view(tensor.shape)


def cuda_capture(device: torch.device) -> Capture | None:
    """Return what captures on a device of this process. None: nothing can be captured there."""
    return CudaCapture(device) if device.type == "cuda" else None


def again(launch: Launch) -> Launch:
    """A `Capture` without a GPU. What a step wrongly remembers from its capture is wrong here, too, so tests find it."""
    launch()
    return launch
