"""Every kernel at a shape where it should be near its limit, with what must be moved and computed, and who else does the same."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.peers import paged, sdpa
from kernels.attention.case import Case as Attention
from kernels.ops import AttentionMeta, ExpertWeights, ScaledKV
from kernels.packed import EightBit, FourBit
from kernels.rounding import Rounding
from kernels.triton import activation, gemm, norm, rope
from kernels.triton.attention import TritonAttention
from kernels.triton.gemm_four_bit import linear_four_bit
from kernels.triton.gemm_scaled import linear_scaled
from kernels.triton.latent import absorbed_attention
from kernels.triton.quantise import round_to
from kernels.triton.sampling import sample
from kernels.triton.weights import experts, linear

Run = Callable[[], object]
Make = Callable[[], "Iterable[Case]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    run: Run
    num_bytes: float = 0
    num_flops: float = 0
    kind: str = "bfloat16"
    target: float = 0.0
    """The share of the floor to reach; with `against`, of the fastest peer."""
    against: bool = False
    replayed: bool = False
    """Whether it is timed without its launches, of which it has several."""
    peers: dict[str, Run] = field(default_factory=dict[str, Run])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    tokens: int
    hidden: int
    batch: int
    context: int
    prompt: int
    vocab: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16


REAL = Sizes(tokens=16384, hidden=8192, batch=128, context=8192, prompt=8192, vocab=128256)
SMOKE = Sizes(
    tokens=4,
    hidden=128,
    batch=2,
    context=40,
    prompt=8,
    vocab=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    block_size=4,
)


class Cases:
    """Tensors are made when a case is asked for and go with it."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self._s, self._device = sizes, device

    def groups(self) -> dict[str, Make]:
        """Return what makes cases, by a name, in the order of what they weigh."""
        prompt = self._s.prompt
        return {
            "decode": lambda: (self._decode(dtype) for dtype in ("bfloat16", "float8", "int8")),
            "prefill": lambda: (self._prefill(*of) for of in ((prompt, prompt), (prompt // 4, prompt * 4))),
            "four bits": lambda: (self._four_bit(*of) for of in ((1, False), (16, False), (16, True))),
            "eight bits": self._eight_bit,
            "elementwise": self._elementwise,
            "rotation": self._rotation,
            "latents": lambda: [self._latents()],
            "sampling": lambda: [self._sampling()],
            "experts": lambda: [self._experts()],
            "packed experts": lambda: (self._packed_experts(kind) for kind in ("float8 blocks", "MXFP4")),
            "rounded products": self._rounded_products,
            "invariant products": lambda: (self._invariant_product(rows) for rows in (16, self._s.tokens)),
            "invariant decode": lambda: [self._invariant_decode()],
        }

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self._device)

    def _elementwise(self) -> Iterator[Case]:
        rows, size = self._s.tokens, self._s.hidden
        x, residual, weight = self._randn(rows, size), self._randn(rows, size), self._randn(size).float()
        plain = weight.bfloat16()
        peers: dict[str, Run] = {"torch": lambda: F.rms_norm(x, (size,), plain, 1e-5)}
        yield Case(
            name="rms_norm",
            run=lambda: norm.rms_norm(x, weight, 1e-5),
            num_bytes=2 * x.nbytes,
            target=0.85,
            peers=peers,
        )
        added = 4 * x.nbytes
        yield Case(
            name="add_rms_norm",
            run=lambda: norm.add_rms_norm(x, residual, weight, 1e-5),
            num_bytes=added,
            target=0.85,
        )
        wide = self._randn(rows, 2 * size)
        yield Case(
            name="silu_mul", run=lambda: activation.silu_mul(wide), num_bytes=1.5 * wide.nbytes, target=0.85
        )
        for how in (Rounding(torch.int8), Rounding(torch.float8_e4m3fn, 128)):
            yield from self._rounded(how, x, weight, wide)

    def _rounded(self, how: Rounding, x: Tensor, weight: Tensor, wide: Tensor) -> Iterator[Case]:
        """What norms and activations make for W8A8 layers; rounding behind the plain ones is what it saves."""
        name = "int8" if how.dtype == torch.int8 else "float8, groups of 128"
        yield Case(
            name=f"rms_norm, {name}", run=lambda: norm.norm_rounded(x, None, weight, 1e-5, how),
            num_bytes=1.5 * x.nbytes, target=0.85,
            peers={"in two steps": lambda: round_to(norm.rms_norm(x, weight, 1e-5), how)},
        )  # fmt: skip
        yield Case(
            name=f"silu_mul, {name}", run=lambda: activation.gated_rounded(wide, "silu", how),
            num_bytes=1.25 * wide.nbytes, target=0.85,
            peers={"in two steps": lambda: round_to(activation.silu_mul(wide), how)},
        )  # fmt: skip

    def _rotation(self) -> Iterator[Case]:
        s = self._s
        qkv = self._randn(s.tokens, (s.heads + 2 * s.kv_heads) * s.head_dim)
        angles = self._randn(s.tokens, s.head_dim)
        blocks = -(-s.tokens // s.block_size)
        pool = self._randn(blocks, 2, s.kv_heads, s.block_size, s.head_dim)
        slots = torch.randperm(blocks * s.block_size, device=self._device)[: s.tokens]
        moved = 2 * qkv.nbytes + 2 * angles.nbytes
        yield Case(
            name="rope_and_write_kv",
            run=lambda: rope.rope_and_write_kv(qkv, angles, angles, slots, pool, s.heads),
            num_bytes=moved,
            target=0.85,
        )

    def _meta(self, lens: list[tuple[int, int]]) -> tuple[AttentionMeta, int]:
        counts = [-(-context // self._s.block_size) for _, context in lens]
        order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int64)
        tables = np.split(order, np.cumsum(counts)[:-1])
        slots = np.zeros(sum(query for query, _ in lens), np.int64)
        queries, contexts = [query for query, _ in lens], [context for _, context in lens]
        return AttentionMeta.build(queries, contexts, tables, slots, self._device), len(order)

    def _decode(self, dtype: str) -> Case:
        s = self._s
        meta, blocks = self._meta([(1, s.context)] * s.batch)
        shape = (blocks, 2, s.kv_heads, s.block_size, s.head_dim)
        q, pool, attend = self._randn(s.batch, s.heads, s.head_dim), self._randn(*shape), TritonAttention()
        scale, name = s.head_dim**-0.5, f"decode attention, {dtype}, batch {s.batch} x {s.context}"
        if dtype != "bfloat16":
            stored = (pool * 20).to(torch.int8 if dtype == "int8" else torch.float8_e4m3fn)
            scales = torch.rand(shape[:-1], device=self._device)
            moved = stored.nbytes + scales.nbytes
            return Case(
                name=name,
                run=lambda: attend(q, ScaledKV(stored, scales), meta, scale, 0, 0.0),
                num_bytes=moved,
                target=0.85,
            )
        peers = {"SDPA, contiguous": sdpa(q[:, :, None], *_contiguous(pool, s.batch), scale, causal=False)}
        peers |= self._paged_peers([(1, s.context)] * s.batch)
        return Case(
            name=name,
            run=lambda: attend(q, pool, meta, scale, 0, 0.0),
            num_bytes=pool.nbytes,
            target=0.85,
            peers=peers,
        )

    def _paged_peers(self, lens: list[tuple[int, int]]) -> dict[str, Run]:
        s = self._s
        scale = s.head_dim**-0.5
        case = Attention(
            num_heads=s.heads,
            num_kv_heads=s.kv_heads,
            head_dim=s.head_dim,
            block_size=s.block_size,
            dtype=torch.bfloat16,
            scale=scale,
        )
        return paged(case, lens, self._device)

    def _latents(self) -> Case:
        s = self._s
        rank, rotated, heads = (16, 8, 4) if s is SMOKE else (512, 64, 128)
        meta, blocks = self._meta([(1, s.context)] * s.batch)
        pool, q = (
            self._randn(blocks, 1, 1, s.block_size, rank + rotated),
            self._randn(s.batch, heads, rank + rotated),
        )
        flops = 2.0 * s.batch * s.context * heads * (2 * rank + rotated)
        name = f"latent attention, batch {s.batch} x {s.context}"
        return Case(
            name=name,
            run=lambda: absorbed_attention(q, pool, meta, 0.1, rank),
            num_bytes=pool.nbytes,
            num_flops=flops,
        )

    def _prefill(self, query: int, context: int) -> Case:
        s = self._s
        meta, blocks = self._meta([(query, context)])
        pool = self._randn(blocks, 2, s.kv_heads, s.block_size, s.head_dim)
        q, scale, attend = self._randn(query, s.heads, s.head_dim), s.head_dim**-0.5, TritonAttention()
        pairs = query * (context - query) + query * (query + 1) / 2
        peers = self._paged_peers([(query, context)])
        if query == context:
            peers["SDPA, contiguous"] = sdpa(
                q.transpose(0, 1)[None], *_contiguous(pool, 1), scale, causal=True
            )
        return Case(
            name=f"prefill attention, {query} of {context}", run=lambda: attend(q, pool, meta, scale, 0, 0.0),
            num_flops=4.0 * pairs * s.heads * s.head_dim, target=0.8 if peers else 0.0, against=True, peers=peers,
        )  # fmt: skip

    def _eight_bit(self) -> Iterator[Case]:
        size = self._s.hidden
        values = (torch.randn(size, size, device=self._device) * 30).clamp(-127, 127)
        for kind, dtype in (("float8", torch.float8_e4m3fn), ("int8", torch.int8)):
            x, each = values.to(dtype), torch.rand(size, device=self._device)
            peers: dict[str, Run] = {}
            if self._device.type == "cuda":
                peers["cuBLAS"] = _cublas(x, each)
            yield Case(
                name=f"{kind} product, {size} cubed", run=_scaled(x, each), num_flops=2.0 * size**3,
                kind=kind, target=0.85,
                against=True, peers=peers,
            )  # fmt: skip
        x, blocks = values.to(torch.float8_e4m3fn), torch.rand(size // 128, size // 128, device=self._device)
        rows = blocks.repeat_interleave(128, 0)
        yield Case(
            name=f"float8 product by blocks, {size} cubed",
            run=lambda: linear_scaled(x, x, rows, blocks, torch.bfloat16), num_flops=2.0 * size**3, kind="float8",
        )  # fmt: skip

    def _rounded_products(self) -> Iterator[Case]:
        """What a W8A8 layer of few rows costs with the rounding of its activations; the weight is read once."""
        size = self._s.hidden
        x = self._randn(min(16, self._s.tokens), size)
        for dtype, blockwise in (
            (torch.int8, False),
            (torch.float8_e4m3fn, False),
            (torch.float8_e4m3fn, True),
        ):
            values = (torch.randn(size, size, device=self._device) * 30).clamp(-127, 127).to(dtype)
            shape = (size // 128, size // 128) if blockwise else (size,)
            weight = EightBit(values, torch.rand(shape, device=self._device))
            kind = f"{'int8' if dtype == torch.int8 else 'float8'}{', blocks' if blockwise else ''}"
            yield Case(
                name=f"rounding and {kind} product, {len(x)} rows",
                run=_linear(x, weight),
                num_bytes=values.nbytes,
                replayed=True,
            )

    def _four_bit(self, rows: int, down: bool) -> Case:
        """`down`: from the many inputs of an MLP's second matrix to few outputs, for which sums are split."""
        inner, size = self._s.hidden, self._s.hidden * 4
        if down:
            inner, size = size, inner
        words = random_words(self._device, inner // 128, size)
        scales = self._randn(inner // 128, size, 2)
        scales[..., 1] = 8
        weight, x = (
            FourBit(words=words, scales=scales, group=128, inputs=inner),
            self._randn(rows, inner),
        )
        moved = words.nbytes + scales.nbytes
        return Case(
            name=f"4-bit weights, {rows} rows{', few outputs' if down else ''}",
            run=lambda: linear_four_bit(x, weight),
            num_bytes=moved,
            target=0.0 if down else 0.75,
            replayed=down,
        )

    def _invariant_product(self, rows: int) -> Case:
        """What engine.deterministic costs: cuBLAS beside it."""
        inner, size = self._s.hidden, self._s.hidden
        x, weight = self._randn(rows, inner), self._randn(size, inner)
        return Case(
            name=f"batch-invariant product, {rows} rows", run=lambda: gemm.linear(x, weight, None),
            num_bytes=weight.nbytes + 2 * x.nbytes, num_flops=2.0 * rows * size * inner,
            peers={"cuBLAS": lambda: F.linear(x, weight)},
        )  # fmt: skip

    def _invariant_decode(self) -> Case:
        s = self._s
        meta, blocks = self._meta([(1, s.context)] * s.batch)
        pool, q = (
            self._randn(blocks, 2, s.kv_heads, s.block_size, s.head_dim),
            self._randn(s.batch, s.heads, s.head_dim),
        )
        attend, name = (
            TritonAttention(1024),
            f"batch-invariant decode attention, batch {s.batch} x {s.context}",
        )
        return Case(
            name=name, run=lambda: attend(q, pool, meta, s.head_dim**-0.5, 0, 0.0), num_bytes=pool.nbytes
        )

    def _experts(self) -> Case:
        tokens, width, count = self._s.tokens, 2 if self._s is SMOKE else 6, 4 if self._s is SMOKE else 64
        hidden, inner = (32, 16) if self._s is SMOKE else (2048, 1408)
        held = ExpertWeights(self._randn(count, 2 * inner, hidden), self._randn(count, hidden, inner))
        x, weights = self._randn(tokens, hidden), torch.rand(tokens, width, device=self._device)
        slots = torch.rand(tokens, count, device=self._device).topk(width).indices
        flops = 6.0 * tokens * width * hidden * inner
        name = f"experts, {tokens} x {width} of {count}"
        return Case(
            name=name, run=lambda: experts(x, slots, weights, held, activation.silu_mul), num_flops=flops
        )

    def _packed_experts(self, kind: str) -> Case:
        """Few rows: each expert's bytes that has a row are the floor."""
        rows, width, count, size = (8, 2, 4, 128) if self._s is SMOKE else (64, 4, 32, 2816)

        def weight(outputs: int, inputs: int) -> EightBit | FourBit:
            if kind == "MXFP4":
                words = random_words(self._device, count, inputs // 128, outputs)
                exponents = torch.full(
                    (count, inputs // 128, outputs, 4), 120, dtype=torch.uint8, device=self._device
                )
                return FourBit(words=words, scales=exponents, group=32, inputs=inputs)
            values = torch.randn(count, outputs, inputs, device=self._device).to(torch.float8_e4m3fn)
            return EightBit(values, torch.rand(count, outputs // 128, inputs // 128, device=self._device))

        held = ExpertWeights(weight(2 * size, size), weight(size, size))
        x, weights = self._randn(rows, size), torch.rand(rows, width, device=self._device)
        slots = torch.rand(rows, count, device=self._device).topk(width).indices
        moved = sum(tensor.nbytes for tensor in held.tensors) * len(slots.unique()) / count
        name = f"experts, {kind}, {rows} x {width} of {count}"
        return Case(
            name=name, run=lambda: experts(x, slots, weights, held, activation.silu_mul), num_bytes=moved, replayed=True,
        )  # fmt: skip

    def _sampling(self) -> Case:
        rows = 1 if self._s is SMOKE else 64
        logits = torch.randn(rows, self._s.vocab, device=self._device) * 3
        each = torch.full((rows,), 0.9, device=self._device)
        top_k = torch.full((rows,), 50, dtype=torch.int32, device=self._device)
        return Case(
            name="sampling, top-k and top-p",
            run=lambda: sample(logits, each, top_k, each, 0 * each, each.double()),
            num_bytes=logits.nbytes
        )  # fmt: skip


def _contiguous(pool: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """(blocks, 2, Hkv, block, D) as if block tables were in order: K and V (batch, Hkv, L, D)."""
    planes = pool.unflatten(0, (batch, -1)).permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
    return planes[0].contiguous(), planes[1].contiguous()


def random_words(device: torch.device, *shape: int) -> Tensor:
    """Four-bit weights of `shape` (.., inputs / 128, outputs)."""
    return torch.randint(-(1 << 15), 1 << 15, (*shape, 32), device=device, dtype=torch.int16)


def _linear(x: Tensor, weight: EightBit) -> Run:
    return lambda: linear(x, weight, None)


def _scaled(x: Tensor, scales: Tensor) -> Run:
    return lambda: linear_scaled(x, x, scales, scales, torch.bfloat16)


def _cublas(x: Tensor, scales: Tensor) -> Run:
    """Without the scales, for integers: torch has no such product."""
    if x.dtype == torch.int8:
        return lambda: torch._int_mm(x, x.T)
    return lambda: torch._scaled_mm(x, x.T, scales[:, None], scales[None], out_dtype=torch.bfloat16)
