"""Paged attention by FlashInfer, over Baton's pool as it is: a layer's (num_blocks, 2, Hkv, block_size, D) is its HND layout.

Written against flashinfer-python 0.7.2 (`BatchDecodeWithPagedKVCacheWrapper`, `BatchPrefillWithPagedKVCacheWrapper`)."""

from typing import Any

import torch
from torch import Tensor

from kernels.attention.case import Backend, Case, StepKind, kind_of
from kernels.ops import AttentionMeta, KVLayer

_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.float16, torch.bfloat16)
_TENSOR_CORE_GROUP = 4
"""From so many heads for each KV head on, decode is faster as a product of matrices. The other kernel is compiled for few
groups."""
_TILE_ROWS = 128
_LEAST_WORKSPACE_BYTES = 128 << 20


def flashinfer_backend(library: Any) -> Backend:
    return Backend("flashinfer", FlashInferAttention(library), unable)


def unable(case: Case) -> str:
    if case.dtype not in _DTYPES:
        return f"FlashInfer computes in float16 and bfloat16, not in {str(case.dtype).removeprefix('torch.')}"
    if case.head_dim not in _HEAD_DIMS:
        return f"FlashInfer has heads of 64, 128 and 256, not of {case.head_dim}"
    return "FlashInfer's kernels know no sinks" if case.sinks else ""


class FlashInferAttention:
    """`Ops.paged_attention`. Steps must follow each other on one stream: wrappers and their scratch memory are kept."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._workspace: Tensor | None = None
        self._wrappers: dict[tuple[object, ...], _Wrapper] = {}

    def __call__(
        self, q: Tensor, kv_layer: KVLayer, meta: AttentionMeta, scale: float, window: int, soft_cap: float,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        assert isinstance(kv_layer, Tensor), "8 bits are read by Triton's kernels"
        assert sinks is None, "a case with sinks is not FlashInfer's"
        kv_heads, block_size = kv_layer.shape[2:4]
        case = Case(
            num_heads=q.shape[1],
            num_kv_heads=kv_heads,
            head_dim=q.shape[2],
            block_size=block_size,
            dtype=q.dtype,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
        )
        wrapper = self._wrapper(kind_of(meta), case, q.device)
        wrapper.plan_for(meta, case)
        return wrapper.run(q, kv_layer)

    def _wrapper(self, kind: StepKind, case: Case, device: torch.device) -> "_Wrapper":
        """Return the wrapper of a case and kind. Its plan holds for all layers of a step, and other cases' plans must not replace
        it."""
        key = (kind, case)
        if key not in self._wrappers:
            self._wrappers[key] = _Wrapper(self._library, kind, case, self._room(case, device))
        return self._wrappers[key]

    def _room(self, case: Case, device: torch.device) -> Tensor:
        """Return the scratch memory that all wrappers share. A wrapper keeps what it was made with."""
        num_bytes = _workspace_bytes(case, device)
        if self._workspace is None or self._workspace.numel() < num_bytes:
            self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        return self._workspace


class _Wrapper:
    def __init__(self, library: Any, kind: StepKind, case: Case, workspace: Tensor) -> None:
        self._kind: StepKind = kind
        self._planned: AttentionMeta | None = None
        self._uploaded: torch.cuda.Event | None = None
        if kind == "decode":
            tensor_cores = case.group >= _TENSOR_CORE_GROUP
            self._library: Any = library.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "HND", use_tensor_cores=tensor_cores, backend="fa2"
            )
        else:
            self._library = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")

    def plan_for(self, meta: AttentionMeta, case: Case) -> None:
        """Plan once a step. Metadata stays in host memory, where FlashInfer plans; it uploads what its kernels read."""
        if self._planned is meta:
            return
        if self._uploaded is not None:
            # A plan leaves by an asynchronous copy from pinned memory, which the next one writes.
            self._uploaded.synchronize()
        # A table may have blocks that are reserved for later tokens; here it says how long the context is.
        lens = zip(meta.block_tables, meta.context_lens, strict=True)
        tables = [table[: -(-length // case.block_size)] for table, length in lens]
        counts = torch.tensor([0, *map(len, tables)], dtype=torch.int32)
        pages = (
            counts.cumsum(0, dtype=torch.int32),
            torch.cat(tables).int(),
            torch.tensor(
                [(length - 1) % case.block_size + 1 for length in meta.context_lens], dtype=torch.int32
            ),
        )
        sizes = (case.num_heads, case.num_kv_heads, case.head_dim, case.block_size)
        options = {
            "sm_scale": case.scale,
            "window_left": case.window - 1,  # tokens before its own; all: -1
            "logits_soft_cap": case.soft_cap,
            "q_data_type": case.dtype,
            "kv_data_type": case.dtype,
        }
        if self._kind == "decode":
            self._library.plan(*pages, *sizes, **options)
        else:
            starts = torch.tensor(meta.query_starts, dtype=torch.int32)
            self._library.plan(starts, *pages, *sizes, causal=True, **options)
        self._planned = meta
        if meta.slots.is_cuda:
            self._uploaded = torch.cuda.Event()
            self._uploaded.record()

    def run(self, q: Tensor, kv_layer: Tensor) -> Tensor:
        return self._library.run(q, kv_layer)


def _workspace_bytes(case: Case, device: torch.device) -> int:
    """Return the bytes of partial results of contexts that are split, in float32. FlashInfer splits them among at most two
    programs for each processor and KV head, each with a tile of at most 128 rows (its scheduler.cuh), and keeps a sum for each
    row beside."""
    if device.type != "cuda":
        return _LEAST_WORKSPACE_BYTES
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    partial = 2 * processors * case.group * _TILE_ROWS * (case.head_dim + 1) * 4
    return max(_LEAST_WORKSPACE_BYTES, partial + (1 << 20))
