"""Stand-ins for nccl-tests, which print what their README shows. Those over nodes are MPI programs: what they print is counted by
an MPI_Allreduce of their ranks."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
PROGRAMS = ("all_reduce_perf", "sendrecv_perf", "alltoall_perf")
needs_mpich = pytest.mark.skipif(
    shutil.which("mpiexec.hydra", path=BIN) is None, reason="needs MPICH's mpiexec: `make setup`"
)

OUTPUT = """\
#       size         count      type   redop    root     time   algbw   busbw #wrong
    67108864      16777216     float     sum      -1    512.3  131.00  {gb_per_s:.2f}      0
# Out of bounds values : {wrong} {verdict}
# Avg bus bandwidth    : {gb_per_s:.2f}
"""
_MPI = """\
#!{python}
import ctypes, os, sys
mpi = ctypes.CDLL("{library}")
world, integer, added = 0x44000000, 0x4C000405, 0x58000003  # handles of MPICH's ABI
mpi.MPI_Init(None, None)
one, total, rank = ctypes.c_int(1), ctypes.c_int(), ctypes.c_int()
mpi.MPI_Allreduce(ctypes.byref(one), ctypes.byref(total), 1, integer, added, world)
mpi.MPI_Comm_rank(world, ctypes.byref(rank))
with open("{folder}/" + os.path.basename(sys.argv[0]) + ".args", "a") as file:
    print(*sys.argv[1:], file=file)
if rank.value == 0:
    print("ranks:", total.value, "where:", os.environ.get("WHERE"))
    print({output!r})
mpi.MPI_Finalize()
"""


def put(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str, text: str) -> None:
    """Write a program, and have `folder` on the PATH."""
    (folder / program).write_text(text)
    (folder / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{BIN}:/usr/bin:/bin")


def put_scripts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, script: str, programs: Sequence[str] = PROGRAMS
) -> None:
    for program in programs:
        put(folder, monkeypatch, program, f"#!/bin/sh\n{script}\n")


def mpi_program(folder: Path, output: str) -> str:
    library = BIN.parent / "lib" / "libmpi.so.12"
    return _MPI.format(python=sys.executable, library=library, folder=folder, output=output)


def put_mpi(
    folder: Path, monkeypatch: pytest.MonkeyPatch, gb_per_s: float, programs: Sequence[str] = PROGRAMS
) -> None:
    for program in programs:
        output = OUTPUT.format(gb_per_s=gb_per_s, wrong=0, verdict="OK")
        put(folder, monkeypatch, program, mpi_program(folder, output))


def says(text: str) -> str:
    return f'echo "$@" > "$0.args"\ncat <<\'END\'\n{text}END'
