"""What attention over latents of 8 bits is off by, in several ways to store them.

    python -m benchmarks.engine.latent_loss [--json FILE]

Random latents of DeepSeek-V3's size, 512 numbers and 64 rotated ones, each 64 of which have one that is `OUTLIER` times as large
as the others; stored and read back by the conversion that a hand-over uses. The rotated part is as large as the rest, or larger,
so that it decides most. Errors are root mean squares relative to those of scores and results over float32 latents."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.report import parser, write
from core.kv import KVLayout
from device.convert import convert

PREDICTION = "Scores are half as far off with the rotated part in bfloat16 as with 8 bits for it, in FP8"
RANK, ROTATED, TOKENS, QUERIES, OUTLIER = 512, 64, 4096, 128, 8.0
SIZES = (1.0, 8.0)
"""How large the rotated numbers are, relative to the others."""
PLAIN = KVLayout(
    num_layers=1, num_kv_heads=1, head_dim=RANK + ROTATED, block_size=16, dtype="float32", state="mla"
)
WAYS = {
    "a scale for each 128, the rotated part in bfloat16": {"group": 128, "kept": (RANK, RANK + ROTATED)},
    "a scale for each 64, all in 8 bits": {"group": 64},
    "one scale for all": {},
}


def measure(size: float) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    latents, q = torch.randn(TOKENS, RANK + ROTATED), torch.randn(QUERIES, RANK + ROTATED)
    latents[:, ::64] *= OUTLIER
    latents[:, RANK:] *= size
    rows: list[dict[str, Any]] = []
    for dtype in ("float8_e4m3fn", "int8"):
        for name, how in WAYS.items():
            plain = replace(PLAIN, **how)  # type: ignore[arg-type]
            stored = replace(plain, dtype=dtype, scales="vector")
            data, scales = convert(plain, latents.numpy().view(np.uint8).reshape(-1), None, stored)
            back, _ = convert(stored, data, scales, plain)
            read = torch.from_numpy(back.view(np.float32).reshape(latents.shape).copy())
            scores, result = (
                _error(*pair) for pair in zip(_attended(q, latents), _attended(q, read), strict=True)
            )
            rows.append(
                {
                    "rotated": size,
                    "dtype": dtype,
                    "how": name,
                    "bytes": stored.token_bytes,
                    "scores": scores,
                    "results": result,
                }
            )
    return rows


def _attended(q: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ latents.T * (2 / (RANK + ROTATED) ** 0.5) / OUTLIER
    return scores, scores.softmax(-1) @ latents[:, :RANK]


def _error(want: Tensor, got: Tensor) -> float:
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())


def main() -> None:
    arguments = parser(__doc__).parse_args()
    rows = [row for size in SIZES for row in measure(size)]
    for row in rows:
        print(
            f"{row['rotated']} {row['dtype']:14} {row['how']:52} {row['bytes']:5} {row['scores']:.4f} {row['results']:.4f}"
        )
    write(arguments.json, "benchmarks.engine.latent_loss", {"prediction": PREDICTION, "rows": rows})


if __name__ == "__main__":
    main()
