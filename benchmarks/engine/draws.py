"""Sampling the tokens of 32 sequences on a CPU, by native kernels and by PyTorch.

    python -m benchmarks.engine.draws [--json FILE] [--threads 1] [--vocab 151936] [--smoke]

Random logits of 32 rows. `masked` is `temperature` with a grammar's masks, which allow nine tokens of ten. Each figure is the
median of interleaved rounds, without the copy of the logits that each sample overwrites."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import parser, write
from core.types import SamplingParams
from kernels.cpu import sampling as native
from kernels.sampling import Masks, SampleShapes
from kernels.torch import sampling as pytorch

PREDICTION = "native samples take 1/4 of PyTorch's time without top-p, and 1/20 with it"
CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=1.0),
    "masked": SamplingParams(temperature=1.0),
    "top-p": SamplingParams(temperature=1.0, top_p=0.9),
    "top-k and top-p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
}
NUM_ROWS = 32


def shapes(params: SamplingParams) -> SampleShapes:
    row = [params.temperature, params.top_k, params.top_p, params.min_p]
    columns = torch.tensor([row] * NUM_ROWS, dtype=torch.float64).T
    numbers = torch.rand(1, NUM_ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return SampleShapes([params] * NUM_ROWS, torch.cat((columns, numbers)).contiguous())


def operations(vocab: int) -> dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]]:
    """By name, the native operation and PyTorch's."""
    found: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {}
    for name, params in CASES.items():
        asked, masks = shapes(params), nine_of_ten(vocab) if name == "masked" else None
        found[name] = (
            lambda x, asked=asked, masks=masks: native.sample(x, asked, masks),
            lambda x, asked=asked, masks=masks: pytorch.sample(x, asked, masks),
        )
    return found


def nine_of_ten(vocab: int) -> Masks:
    places = torch.rand(NUM_ROWS, (vocab + 31) // 32, 32, generator=torch.Generator().manual_seed(1)) < 0.9
    words = (places.long() << torch.arange(32)).sum(-1)
    return Masks(torch.arange(NUM_ROWS), words.to(torch.int32))


def milliseconds(operation: Callable[[Tensor], Any], logits: Tensor) -> float:
    own = logits.clone()
    started = time.perf_counter()
    operation(own)
    return 1e3 * (time.perf_counter() - started)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--vocab", type=int, default=151_936)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    vocab, rounds = (4096, 1) if args.smoke else (args.vocab, 7)
    logits = torch.randn(NUM_ROWS, vocab, generator=torch.Generator().manual_seed(0)) * 3
    results: dict[str, dict[str, float]] = {}
    for name, ways in operations(vocab).items():
        took = [[milliseconds(way, logits) for way in ways] for _ in range(rounds)]
        own, theirs = (statistics.median(column) for column in zip(*took, strict=True))
        results[name] = {
            "native_ms": round(own, 3),
            "pytorch_ms": round(theirs, 3),
            "ratio": round(theirs / own, 2),
        }
        print(f"{name}: native {own:.2f} ms, PyTorch {theirs:.2f} ms, {theirs / own:.1f} times as long")
    command = f"benchmarks.engine.draws --threads {args.threads} --vocab {args.vocab}"
    write(args.json, command, {"prediction": PREDICTION, "rows": NUM_ROWS, "results": results})


if __name__ == "__main__":
    main()
