"""Reads a checkpoint's tensors by name, and only the part of each that this rank holds.

A tensor that no model asks for, or that is missing, is an error that names it."""

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from core.errors import UnsupportedModel
from kernels.packed import Kind, Unread, Weight, on_device, tensors_of
from models.formats.gguf_file import GgufTensor
from models.formats.matrix_rounder import MatrixRounder
from models.formats.matrix_ways import find_matrix, parts_of
from models.formats.packed import divided
from models.formats.rounded_matrix import OF_EXPERT, WeightRounding
from models.formats.stored_matrix import Cut, StoredMatrix, require_shape
from models.formats.tensor_files import TensorFiles
from models.lora.low_rank import AdapterWeights, no_adapters
from models.spec.quantisation import Quantisation

Shard = Callable[[str, tuple[int, ...]], Cut]
"""(name in the checkpoint, full shape) -> what this rank holds of it."""
_log = logging.getLogger(__name__)
_STORED = {
    torch.float32: ("F32", "F16", "BF16", "F64"),
    torch.bfloat16: ("F32", "F16", "BF16", "F64"),
    torch.float16: ("F32", "F16", "BF16", "F64"),
    torch.uint8: ("U8",),
    torch.int64: ("I64", "I32"),
}
_HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}
IGNORED_SUFFIXES = (
    "rotary_emb.inv_freq",
    *(f".{what}_scale" for what in ("input", "input_global", "activation", "output", "q", "k", "v")),
)
"""Suffixes that are not read: scales of activations (read only with weights that stay as they are stored), and of a quantised KV
cache."""


def whole(name: str, shape: tuple[int, ...]) -> Cut:
    """The `Shard` of a rank that holds everything."""
    del name
    return [[slice(0, size)] for size in shape]


def held_rows(shard: Shard, name: str, count: int) -> list[int]:
    """Which of `count` rows of a tensor `name` the shard holds."""
    return [row for run in shard(name, (count,))[0] for row in range(run.start, run.stop)]


class Checkpoint:
    """The safetensors files of a folder, single or sharded, or its GGUF file. `close` checks that everything was used."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = whole,
        quantisation: Quantisation | None = None,
        keeps: frozenset[Kind] = frozenset(),
        *,
        adapters: AdapterWeights | None = None,
        reads_matrices: bool = True,
        rounds: WeightRounding | None = None,
    ) -> None:
        """`keeps` says what `matrix` leaves as it is stored (`Ops.keeps`). Without `reads_matrices` it returns
        `Unread` ones, but for those of experts: whoever packs them has them already. `rounds`: see `WeightSource`."""
        self.adapters = no_adapters() if adapters is None else adapters
        self._folder, self.dtype, self.device, self._shard = folder, dtype, device, shard
        self._quantisation, self.keeps, self._reads_matrices = quantisation, keeps, reads_matrices
        self._tensors = TensorFiles(folder, decoders=True)
        made = keeps if rounds is None else rounds.kept(keeps)
        self.rounds, self._rounder = rounds, MatrixRounder(self._tensors, dtype, device, made)
        self._unused = set(self._tensors)
        self._num_floats = 0
        """Matrices that are stored in fewer bits."""

    @property
    def bytes_read(self) -> int:
        """Return the bytes of tensors that were read, as they are in the files."""
        return self._tensors.bytes_read

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """This rank's part of the tensor, in `dtype` or the model's; `shape` is the whole tensor's.

        Raises UnsupportedModel when it is missing or has another shape."""
        wanted, cut = dtype or self.dtype, self._shard(name, shape)
        if (matrix := self._in_fewer_bits(name, shape)) is not None:
            self._num_floats += 1
            return matrix.floats(cut).to(self.device, wanted)
        stored = self._stored(name, shape)
        if stored not in _STORED[wanted]:
            raise UnsupportedModel(f"tensor {name!r} is stored as {stored}, which is not supported")
        self._unused.discard(name)
        return self._tensors.read(name, cut).to(self.device, wanted)

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        """Return the part as `take` does, but as it is stored where that is among `keeps`, or rounded."""
        if not self._reads_matrices and not OF_EXPERT.search(name):
            return self._unread(name, shape)
        return self._matrix(name, shape, self.rounds)

    def table(self, name: str, shape: tuple[int, int]) -> Weight:
        if not self._reads_matrices:
            return self._unread(name, shape)
        return self._matrix(name, shape, None if self.rounds is None else self.rounds.of_tables)

    def each_expert(
        self, name: str, shape: tuple[int, int, int], *, transposed: bool = False
    ) -> list[Weight] | None:
        if self.rounds is None:
            return None
        self._stored(name, shape)
        cut = self._shard(name, shape)
        found = self._rounder.experts(self.rounds, name, shape, cut, transposed=transposed)
        self._unused -= {name} if found else set[str]()
        return found

    def _matrix(self, name: str, shape: tuple[int, int], to: WeightRounding | None) -> Weight:
        own = None if to is None else to.of_matrix(name)
        packed = self._packed(name, shape) if own is None else self._rounded(name, shape, own)
        return self.take(name, shape, self._half(name)) if packed is None else on_device(packed, self.device)

    def _rounded(self, name: str, shape: tuple[int, int], to: WeightRounding) -> Weight | None:
        self._stored(name, shape)
        found = self._rounder.part(to, name, shape, self._shard(name, shape))
        self._unused -= set[str]() if found is None else {name}
        return found

    def _unread(self, name: str, shape: tuple[int, int]) -> Unread:
        self.ignore(name)
        rows, inputs = (sum(run.stop - run.start for run in runs) for runs in self._shard(name, shape))
        return Unread(torch.empty(rows, 0), inputs)

    def _half(self, name: str) -> torch.dtype | None:
        """Return the dtype of a matrix that stays in 16 bits; None for others."""
        stored = self._tensors.dtype_of(name) if "half" in self.keeps else None
        return None if stored is None else _HALVES.get(stored)

    def _packed(self, name: str, shape: tuple[int, int]) -> Weight | None:
        if self._quantisation is None or not self.keeps - {"half"}:
            return None
        if self._quantisation.kind == "gguf":
            return self._from_gguf(name, shape)
        matrix = self._in_fewer_bits(name, shape)
        return None if matrix is None else matrix.kept(self._shard(name, shape), self.keeps)

    def _in_fewer_bits(self, name: str, shape: tuple[int, ...]) -> StoredMatrix | None:
        if self._quantisation is None or self._quantisation.kind == "gguf":
            return None
        matrix = find_matrix(self._tensors, self._quantisation, name, shape)
        if matrix is not None:
            self.ignore(name)
        return matrix

    def _from_gguf(self, name: str, shape: tuple[int, int]) -> Weight | None:
        self._stored(name, shape)
        stored, cut = self._tensors.piece(name), self._shard(name, shape)
        if not isinstance(stored, GgufTensor) or (kind := stored.block_type(self.keeps)) is None:
            return None
        divided(name, cut[1], shape[1], kind.group)
        packed = stored.packed(kind, cut)
        if packed is None:
            self._num_floats += 1
        else:
            self._unused.discard(name)
            self._tensors.count(name, sum(tensor.nbytes for tensor in tensors_of(packed)))
        return packed

    def _stored(self, name: str, shape: tuple[int, ...]) -> str:
        """Return safetensors' name of its dtype. Raises UnsupportedModel."""
        stored = self._tensors.dtype_of(name)
        if stored is None:
            raise UnsupportedModel(f"the checkpoint in {self._folder} lacks the tensor {name!r}")
        require_shape(self._tensors, name, shape)
        return stored

    def held(self, name: str, count: int) -> list[int]:
        """Return which of `count` things that have tensors of their own this rank holds. The `Shard` is asked for rows of a
        tensor `name`, which need not exist."""
        return held_rows(self._shard, name, count)

    def ignore(self, *names: str) -> None:
        """Ignore tensors that are not this model's, or not this rank's."""
        self._unused.difference_update(names, *map(parts_of, names))

    def ignore_under(self, *prefixes: str) -> None:
        self._unused = {name for name in self._unused if not name.startswith(prefixes)}

    def close(self) -> None:
        """Close the files. Raises UnsupportedModel when a tensor was not read."""
        left = sorted(name for name in self._unused if not name.endswith(IGNORED_SUFFIXES))
        if self.keeps - {"half"} and self._num_floats:
            _log.info(
                "%d matrices of few bits are floats here: no kernel reads them as they are stored",
                self._num_floats,
            )
        self._tensors.close()
        if left:
            raise UnsupportedModel(
                f"no rule says what to do with {len(left)} tensors of the checkpoint, e.g. {left[0]!r}"
            )
