"""The library of native kernels, loaded at its first use, and which instruction sets it may use here."""

import logging
import os
import time
from ctypes import CDLL, c_float, c_int, c_int64, c_uint64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, get_args

from core.errors import ConfigError
from kernels.cpu.build import BuildError, library_path, this_machine

_log = logging.getLogger(__name__)
SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "baton_has": (c_int, (c_int,)),
    "baton_tiles": (c_int, ()),
    "baton_packed_bytes": (c_int64, (c_int, c_int64, c_int64, c_int64, c_int, c_int)),
    "baton_pack_floats": (None, (c_int, c_int64, c_int64, c_int64, c_int, c_void_p, c_void_p, c_int)),
    "baton_pack_whole": (
        None,
        (c_int, c_int64, c_int64, c_int64, c_int, c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int),
    ),
    "baton_linear": (
        None,
        (
            *(c_int, c_int, c_int64, c_int64, c_int64, c_int, c_int),
            *(c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int),
        ),
    ),
    "baton_rows": (
        c_int64,
        (c_int, c_int64, c_int64, c_int64, c_int, c_int, c_void_p, c_void_p, c_int64, c_void_p, c_int),
    ),
    "baton_lanes": (c_int64, (c_int,)),
    "baton_check_tables": (c_int64, (c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64)),
    "baton_check_slots": (c_int64, (c_void_p, c_int64, c_int64)),
    "baton_attend": (
        None,
        (
            *(c_int, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64),
            *(c_void_p, c_void_p, c_int64, c_int64, c_float, c_float, c_void_p),
            *(c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_int),
        ),
    ),
    "baton_sample": (
        None,
        (c_int, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int),
    ),
    "baton_norm": (
        None,
        (c_int, c_void_p, c_void_p, c_void_p, c_float, c_int64, c_int64, c_void_p, c_void_p, c_int),
    ),
    "baton_gate": (None, (c_int, c_int, c_void_p, c_int64, c_int64, c_void_p, c_int)),
    "baton_feed_forward": (
        None,
        (c_int, c_int, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int),
    ),
    "baton_turn": (
        None,
        (
            *(c_int, c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p),
            *(c_float, c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_int64, c_int),
        ),
    ),
    "baton_run_layers": (None, (c_void_p, c_int64, c_void_p, c_int)),
    "baton_spin": (c_int64, (c_int, c_int, c_int64)),
    "baton_read": (c_uint64, (c_int, c_void_p, c_int64, c_int)),
}
"""(result, arguments) of each function of `src/api.cpp`."""

_BFLOAT16: Final = 1
"""As `src/layout.h` numbers formats."""
_TRIALS, _SPINS = 8, 10_000
"""Some tens of microseconds each; the fastest counts, since others share the processor."""
_GAIN: Final = 1.2


class Isa(IntEnum):
    """Instruction sets, as `src/api.cpp` numbers them. On x86-64 a later one has all of an earlier one."""

    AVX2 = 0
    """With FMA and F16C."""
    AVX512 = 1
    """F, BW, DQ, VL and VNNI."""
    AVX512_BF16 = 2
    """With an instruction for products of bfloat16: rows are rounded to it for matrices of it."""
    AMX = 3
    """With tiles, for products of bfloat16, which round rows as well, and of bytes."""
    NEON = 4
    """ARM's, with dot products. It has as many lanes as AVX2 and gives the same bits."""

    @property
    def level(self) -> int:
        """The place among what `BATON_MAX_CPU_ISA` may name: NEON has AVX2's."""
        return Isa.AVX2 if self == Isa.NEON else self

    @property
    def rounds_rows(self) -> bool:
        """Whether rows are rounded to bfloat16 for matrices of it, and keys and values for pools of it."""
        return self.level >= Isa.AVX512_BF16


Tiles = Literal["none", "emulated", "processor"]
"""What computes products by tiles; the order is that of `src/isa.h`."""


def load(path: Path) -> CDLL:
    """The library at `path`, with its functions' types."""
    library = CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@cache
def native() -> CDLL | None:
    """None where there is no library, or no instruction set for it: the log says why, once."""
    try:
        library = load(library_path())
    except (BuildError, OSError) as error:
        _log.warning(
            "PyTorch computes products, in float32: there are no native kernels here, since %s", error
        )
        return None
    if not any(library.baton_has(isa) for isa in (Isa.AVX2, Isa.NEON)):
        _log.warning("PyTorch computes products, in float32: this processor lacks %s", _lacking())
        return None
    return library


def _lacking() -> str:
    return "AVX2, FMA or F16C" if this_machine() == "x86_64" else "dot products, which ARMv8.2 has (asimddp)"


def loaded() -> CDLL:
    """Return `native`, for callers that use native kernels only where there are some."""
    found = native()
    assert found is not None, "there are no native kernels here"
    return found


def instruction_sets() -> list[Isa]:
    """Return the instruction sets of this processor; none without `native`."""
    library = native()
    return [] if library is None else [isa for isa in Isa if library.baton_has(isa)]


def tiles() -> Tiles:
    """Return what computes by tiles here: where `BATON_EMULATE_TILES` is 1, and the processor has none, an emulation that is a
    hundred times slower, for tests."""
    library, kinds = native(), get_args(Tiles)
    return kinds[0 if library is None else library.baton_tiles()]


def allowed_sets() -> list[Isa]:
    """Return those that may be chosen: where `BATON_MAX_CPU_ISA` names one, none behind it. A name of the other architecture
    limits this one to sets of its level. Raises ConfigError."""
    name = os.environ.get("BATON_MAX_CPU_ISA", "").upper()
    if name and name not in Isa.__members__:
        known = ", ".join(isa.name.lower() for isa in Isa)
        raise ConfigError(f"BATON_MAX_CPU_ISA is {name.lower()}: it may be one of {known}")
    return [isa for isa in instruction_sets() if not name or isa.level <= Isa[name].level]


@cache
def fastest_exact() -> Isa:
    """Return the fastest instruction set that rounds no row to bfloat16. Needs `native`."""
    return max(isa for isa in allowed_sets() if not isa.rounds_rows)


@cache
def fastest_of_bytes() -> Isa:
    """Return the fastest instruction set for matrices of 8 and 4 bits, whose products are exact with all. Needs `native`."""
    return Isa.AMX if Isa.AMX in allowed_sets() else fastest_exact()


@cache
def fastest_of_bfloat16() -> Isa | None:
    """Return the fastest instruction set for products of bfloat16; None without `native`. A vector instruction for them may take
    longer than those of float32 that do the same, as on Intel's processors: both are tried. Tiles are always faster."""
    library = native()
    if library is None:
        return None
    if Isa.AMX in allowed_sets():
        if tiles() == "emulated":
            _log.warning(
                "products are a hundred times slower: BATON_EMULATE_TILES is 1, and there are no tiles here"
            )
        return Isa.AMX
    if Isa.AVX512_BF16 not in allowed_sets():
        return fastest_exact()

    def rate(isa: Isa) -> float:
        found = 0.0
        for _ in range(_TRIALS):
            start = time.perf_counter()
            count = library.baton_spin(isa, _BFLOAT16, _SPINS)
            found = max(found, count / (time.perf_counter() - start))
        return found

    return Isa.AVX512_BF16 if rate(Isa.AVX512_BF16) > _GAIN * rate(fastest_exact()) else fastest_exact()
