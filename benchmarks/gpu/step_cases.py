"""What a step launches beside attention over plain caches and large products: see cases.py, of which these are more."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.cases import SMOKE, Case, Make, Sizes, random_words
from device import many_copies
from device.cuda import load_launch
from kernels.ops import AttentionMeta, ScaledKV
from kernels.packed import FourBit
from kernels.rounding import Rounding
from kernels.routing import Routing
from kernels.torch.experts import route as torch_route
from kernels.triton import rope
from kernels.triton.attention import TritonAttention
from kernels.triton.fixed_step import TritonFixedStep
from kernels.triton.gemm import batched_linear
from kernels.triton.gemm_few import linear_few
from kernels.triton.gemm_four_bit import linear_four_bit
from kernels.triton.grouped import add_lora
from kernels.triton.latent import absorbed_attention
from kernels.triton.quantise import round_to
from kernels.triton.route import route
from kernels.triton.sampling import likeliest, logprobs, mask, penalise_entries
from kernels.triton.token_index import select_tokens, selected_attention


class StepCases:
    """Tensors are made when a case is asked for and go with it."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self._s, self._device, self._small = sizes, device, sizes is SMOKE

    def groups(self) -> dict[str, Make]:
        """Return what makes cases, by a name, in the order of what they weigh."""
        equal = [self._s.context] * self._s.batch
        found: dict[str, Callable[[], Case]] = {
            "equal contexts for graphs": lambda: self._fixed_decode(equal, "equal contexts"),
            "uneven contexts for graphs": lambda: self._fixed_decode(
                self._uneven(), "one long context among short ones"
            ),
            "MXFP4": self._mxfp4,
            "writing of int8": self._rounded_writes,
            "rope": self._rotation,
            "rounding": self._rounding,
            "routing": self._routing,
            "log-probabilities": self._logprobs,
            "likeliest tokens": self._likeliest,
            "few rows": lambda: self._few_rows(16),
            "one row": lambda: self._few_rows(1),
            "penalties": self._penalties,
            "masks": self._masks,
            "adapters": self._adapters,
            "latents for graphs": self._fixed_latents,
            "choice of tokens": self._choice,
            "chosen tokens": self._chosen,
            "heads": self._heads,
        }
        if not self._small:
            found = {"scattered pieces": self._scattered} | found
        return {name: lambda make=make: [make()] for name, make in found.items()}

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self._device)

    def _scattered(self) -> Case:
        """Pieces of one head's keys or values in one block, between a pool and another whose blocks lie elsewhere: the launch of
        `device/many_copies.py`, for which cupy is needed."""
        s = self._s
        pool = self._randn(s.batch * 8, 2, s.kv_heads, s.block_size, s.head_dim)
        target = torch.empty_like(pool)
        size, count = pool[0, 0, 0].nbytes, pool.nbytes // pool[0, 0, 0].nbytes
        there, here = (base.data_ptr() + torch.randperm(count) * size for base in (target, pool))
        pieces = torch.stack([there, here, torch.full_like(there, size)]).pin_memory()
        launch = load_launch(many_copies.SOURCE, many_copies.NAME)
        arguments = (np.uint64(pieces.data_ptr()), np.uint64(count))

        def run(kept: tuple[Tensor, ...] = (pieces, pool, target)) -> object:
            """The kernel knows addresses alone, so `kept` says what must live."""
            return launch(many_copies.MAX_PROGRAMS, many_copies.THREADS, arguments, 0)

        return Case(name="scattered KV pieces, one launch", run=run, num_bytes=2 * pool.nbytes, target=0.3)

    def _uneven(self) -> list[int]:
        return [self._s.context * 4, *[max(1, self._s.context // 16)] * 7]

    def _filled(self, lens: list[int]) -> tuple[TritonFixedStep, int]:
        """Return a filled pool, and the number of blocks that it is filled with."""
        size = self._s.block_size
        counts = [-(-length // size) for length in lens]
        order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int64)
        fixed = TritonFixedStep(len(lens), len(lens), max(counts), len(order), size, self._device)
        inputs = fixed.inputs([1] * len(lens), lens, np.split(order, np.cumsum(counts)[:-1]), [0] * len(lens))
        fixed.fill([torch.from_numpy(each).to(self._device) for each in inputs])
        return fixed, len(order)

    def _fixed_decode(self, lens: list[int], name: str) -> Case:
        """What CUDA graphs replay; beside it the kernels with a plan of their own for the step."""
        s = self._s
        fixed, blocks = self._filled(lens)
        pool = self._randn(blocks + 1, 2, s.kv_heads, s.block_size, s.head_dim)
        q, attend, scale = self._randn(len(lens), s.heads, s.head_dim), TritonAttention(), s.head_dim**-0.5
        moved = 2.0 * sum(lens) * s.kv_heads * s.head_dim * pool.itemsize
        return Case(
            name=f"decode attention for graphs, {name}",
            run=lambda: attend(q, pool, fixed.meta, scale, 0, 0.0), num_bytes=moved, target=0.85, replayed=True
        )  # fmt: skip

    def _fixed_latents(self) -> Case:
        s = self._s
        rank, rotated, heads = (16, 8, 4) if self._small else (512, 64, 128)
        fixed, blocks = self._filled([s.context] * s.batch)
        pool = self._randn(blocks + 1, 1, 1, s.block_size, rank + rotated)
        q = self._randn(s.batch, heads, rank + rotated)
        flops = 2.0 * s.batch * s.context * heads * (2 * rank + rotated)
        return Case(
            name="latent attention for graphs",
            run=lambda: absorbed_attention(q, pool, fixed.meta, 0.1, rank), num_bytes=pool.nbytes,
            num_flops=flops, replayed=True
        )  # fmt: skip

    def _indexed(self) -> tuple[AttentionMeta, Tensor, int]:
        """Return a decode step, its pool of latents with index keys behind them, and how many tokens each query chooses."""
        s = self._s
        size, top_k = (16 + 8 + 16, s.context // 2) if self._small else (512 + 64 + 128, 2048)
        each = -(-s.context // s.block_size)
        tables = np.random.default_rng(0).permutation(s.batch * each).astype(np.int64).reshape(s.batch, each)
        lens, slots = [s.context] * s.batch, np.zeros(s.batch, np.int64)
        meta = AttentionMeta.build([1] * s.batch, lens, list(tables), slots, self._device)
        return meta, self._randn(s.batch * each, 1, 1, s.block_size, size), min(top_k, s.context)

    def _choice(self) -> Case:
        s = self._s
        meta, pool, top_k = self._indexed()
        heads, size = (4, 16) if self._small else (64, 128)
        q, weights = self._randn(s.batch, heads, size), self._randn(s.batch, heads).float()
        return Case(
            name=f"choice of {top_k} tokens, batch {s.batch} x {s.context}",
            run=lambda: select_tokens(q, weights, pool, meta, top_k),
            num_bytes=2.0 * s.batch * s.context * size, num_flops=2.0 * s.batch * s.context * heads * size,
        )  # fmt: skip

    def _chosen(self) -> Case:
        s = self._s
        meta, pool, top_k = self._indexed()
        rank, rotated, heads = (16, 8, 4) if self._small else (512, 64, 128)
        slots = torch.stack([torch.randperm(s.context)[:top_k] for _ in range(s.batch)]).to(self._device)
        k_up, v_up = self._randn(heads, 128, rank), self._randn(heads, 128, rank)
        q = self._randn(s.batch, heads, 128 + rotated)
        return Case(
            name=f"attention to {top_k} chosen tokens, batch {s.batch}",
            run=lambda: selected_attention(q, pool, slots, meta, 0.1, k_up, v_up),
            num_bytes=2.0 * slots.numel() * (rank + rotated), num_flops=2.0 * slots.numel() * heads * (2 * rank + rotated),
        )  # fmt: skip

    def _rounding(self) -> Case:
        x = self._randn(self._s.tokens, self._s.hidden)
        how = Rounding(torch.int8)
        return Case(
            name="rounding to int8", run=lambda: round_to(x, how), num_bytes=1.5 * x.nbytes, target=0.85
        )

    def _rotation(self) -> Case:
        s = self._s
        x, angles = self._randn(s.tokens, s.heads, s.head_dim), self._randn(s.tokens, s.head_dim)
        moved = 2.0 * x.nbytes + 2 * angles.nbytes
        return Case(name="rope", run=lambda: rope.rope(x, angles, angles), num_bytes=moved, target=0.85)

    def _rounded_writes(self) -> Case:
        s = self._s
        qkv = self._randn(s.tokens, (s.heads + 2 * s.kv_heads) * s.head_dim)
        angles, blocks = self._randn(s.tokens, s.head_dim), -(-s.tokens // s.block_size)
        shape = (blocks, 2, s.kv_heads, s.block_size)
        pool = ScaledKV(
            torch.zeros(*shape, s.head_dim, dtype=torch.int8, device=self._device),
            torch.zeros(shape, device=self._device),
        )
        slots = torch.arange(s.tokens, device=self._device)
        queries = s.tokens * s.heads * s.head_dim * qkv.itemsize
        moved = qkv.nbytes + 2 * angles.nbytes + queries + pool.data.nbytes + pool.scales.nbytes
        return Case(
            name="rope_and_write_kv, int8",
            run=lambda: rope.rope_and_write_kv(qkv, angles, angles, slots, pool, s.heads),
            num_bytes=moved,
            target=0.85,
        )  # fmt: skip

    def _mxfp4(self) -> Case:
        inner, size = self._s.hidden, self._s.hidden * 4
        words = random_words(self._device, inner // 128, size)
        exponents = torch.full((inner // 128, size, 4), 120, dtype=torch.uint8, device=self._device)
        weight, x = (
            FourBit(words=words, scales=exponents, group=32, inputs=inner),
            self._randn(min(16, self._s.tokens), inner),
        )
        moved = words.nbytes + exponents.nbytes
        return Case(
            name=f"MXFP4 weights, {len(x)} rows",
            run=lambda: linear_four_bit(x, weight),
            num_bytes=moved,
            target=0.75,
        )

    def _heads(self) -> Case:
        """Latents' up-projection with engine.deterministic; an einsum beside it."""
        heads, inner, size = (2, 16, 16) if self._small else (128, 512, 128)
        x, weight = self._randn(self._s.batch, heads, inner), self._randn(heads, size, inner)
        return Case(
            name="batch-invariant products of heads", run=lambda: batched_linear(x, weight),
            num_bytes=weight.nbytes + 1.25 * x.nbytes,
            num_flops=2.0 * x.numel() * size, peers={"cuBLAS": lambda: torch.einsum("thk,hnk->thn", x, weight)},
        )  # fmt: skip

    def _routing(self) -> Case:
        """DeepSeek-V3's; PyTorch's operations beside it."""
        routing = Routing(
            top_k=2 if self._small else 8,
            scoring="sigmoid",
            renormalise=True,
            scale=2.5,
            num_groups=4,
            top_groups=2,
            group_best=2,
        )
        logits = torch.randn(self._s.tokens, 8 if self._small else 256, device=self._device)
        bias = torch.randn(logits.shape[1], device=self._device)
        peers = {"torch": lambda: torch_route(logits, bias, routing)}
        moved = logits.nbytes + 12.0 * routing.top_k * len(logits)
        return Case(name="routing", run=lambda: route(logits, bias, routing), num_bytes=moved, peers=peers)

    def _adapters(self) -> Case:
        rows, count, rank, size = (4, 2, 16, 32) if self._small else (256, 8, 16, 4096)
        x, out = self._randn(rows, size), self._randn(rows, size)
        shrink, expand = self._randn(count, rank, size), self._randn(count, size, rank)
        adapters = torch.arange(rows, device=self._device) % count
        moved = shrink.nbytes + expand.nbytes + x.nbytes + 2 * out.nbytes
        return Case(
            name=f"LoRA, {count} of rank {rank}",
            run=lambda: add_lora(out, x, shrink, expand, adapters),
            num_bytes=moved,
            replayed=True,
        )

    def _logits(self) -> Tensor:
        return torch.randn(1 if self._small else 64, self._s.vocab, device=self._device)

    def _logprobs(self) -> Case:
        logits = self._logits()
        tokens = torch.zeros(len(logits), dtype=torch.int64, device=self._device)
        peers = {"torch": lambda: logits.log_softmax(-1).topk(5)}
        return Case(
            name="log-probabilities",
            run=lambda: logprobs(logits, tokens, 5),
            num_bytes=logits.nbytes,
            peers=peers,
        )

    def _likeliest(self) -> Case:
        logits = self._logits()
        peers = {"torch": lambda: logits.argmax(-1)}
        return Case(
            name="likeliest tokens", run=lambda: likeliest(logits), num_bytes=logits.nbytes, peers=peers
        )

    def _few_rows(self, rows: int) -> Case:
        x, weight = self._randn(rows, self._s.hidden), self._randn(self._s.hidden, self._s.hidden)
        return Case(
            name=f"product, {rows} rows",
            run=lambda: linear_few(x, weight, None),
            num_bytes=weight.nbytes + 2 * x.nbytes,
            peers={"cuBLAS": lambda: F.linear(x, weight)},
        )

    def _penalties(self) -> Case:
        logits = self._logits()
        each = torch.full((len(logits),), 1.1, device=self._device)
        per_row = min(2048, self._s.vocab)
        tokens = torch.arange(per_row, device=self._device).repeat(len(logits))
        rows = torch.arange(len(logits), device=self._device).repeat_interleave(per_row)
        moved = 3.0 * tokens.nbytes + 2 * 4 * tokens.numel()
        return Case(
            name="penalties",
            run=lambda: penalise_entries(logits, rows, tokens, rows, each, each, each),
            num_bytes=moved,
        )

    def _masks(self) -> Case:
        """Half of the tokens forbidden in every row: the worst case, since what is forbidden is written."""
        logits = self._logits()
        rows = torch.arange(len(logits), device=self._device)
        words = -(-logits.shape[1] // 32)
        bits = torch.full((len(logits), words), 0x55555555, dtype=torch.int32, device=self._device)
        return Case(
            name="grammar masks",
            run=lambda: mask(logits, rows, bits),
            num_bytes=bits.nbytes + logits.nbytes / 2,
        )
