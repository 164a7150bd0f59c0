"""Compiles `src` into one library. A wheel has it; a working tree builds it once, into the user's cache, by the sources' digest.

    python -m kernels.cpu.build    # builds what is missing; says so where it cannot

setup.py runs this file too: it imports nothing but the standard library."""

import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

_log = logging.getLogger(__name__)
SOURCES: Final = Path(__file__).with_name("src")
NAME: Final = "libbaton_kernels.so"
_COMPILERS: Final = ("c++", "g++", "clang++")
_FLAGS: Final = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra",
    # GCC 12 says so of its own header of AVX-512.
    "-Wno-uninitialized", "-Wno-maybe-uninitialized",
)  # fmt: skip
_AVX2: Final = ("-mavx2", "-mfma", "-mf16c")
_AVX512: Final = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
_NEON: Final = (
    "-march=armv8.2-a+dotprod",
    # Vectors are pairs of registers. GCC keeps sums in these only where it unrolls each loop over rows, and loads nothing early.
    "-fno-schedule-insns", "--param=max-completely-peeled-insns=1000",
)  # fmt: skip
_OWN_FLAGS: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "x86_64": {
        "isa_x86.cpp": (),
        "avx2.cpp": _AVX2,
        "avx512.cpp": (*_AVX2, *_AVX512),
        "avx512_bf16.cpp": (*_AVX2, *_AVX512, "-mavx512bf16"),
        "amx_emulated.cpp": (*_AVX2, *_AVX512, "-mavx512bf16"),
        "amx.cpp": (*_AVX2, *_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    },
    "aarch64": {"isa_arm.cpp": (), "neon.cpp": _NEON},
}
"""Flags of each architecture's own files, the smaller instruction sets first. Other files run on every processor of either."""
_SAME: Final = {"AMD64": "x86_64", "arm64": "aarch64"}
"""Other names of machines."""
_TIMEOUT_S: Final = 300


class BuildError(Exception):
    """Why there is no library, for people."""


def library_path() -> Path:
    """The installed library, or the one in the cache, which is built if it is missing. Raises BuildError."""
    shipped = Path(__file__).with_name(NAME)
    return shipped if shipped.exists() else build_once(cache_folder())


def cache_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "baton" / "kernels"


def build_once(
    folder: Path, extra: Sequence[str] = (), compiler: Sequence[str] = (), machine: str | None = None
) -> Path:
    """The library of these sources in `folder`. Of processes that ask at once one builds, and the others wait. `extra`: flags
    behind the others. `machine`: another than this, for which `compiler` compiles. Raises BuildError."""
    path = folder / f"{_digest(extra, machine or platform.machine())}-{NAME}"
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _log.info("native kernels are compiled into %s, or awaited: once, for about a minute", path)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                with tempfile.TemporaryDirectory(dir=folder) as made:
                    compile_to(Path(made) / NAME, extra, compiler, machine)
                    os.replace(Path(made) / NAME, path)
    except OSError as error:
        raise BuildError(f"{folder} cannot be written: {error}") from error
    return path


def compile_to(
    library: Path, extra: Sequence[str] = (), compiler: Sequence[str] = (), machine: str | None = None
) -> None:
    """Compile this machine's kernels, or those of `machine` by a cross compiler for it. Raises BuildError."""
    machine = machine or this_machine()
    compiler = compiler or find_compiler()
    own, folder = _OWN_FLAGS[machine], library.parent

    def compile_one(source: Path) -> Path:
        made = folder / f"{source.stem}.o"
        flags = (*_FLAGS, *own.get(source.name, ()), *extra)
        _run([*compiler, *flags, "-c", str(source), "-o", str(made)])
        return made

    # Of functions that several files have, such as the standard library's, the linker takes the first: one that all may run.
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = list(threads.map(compile_one, sources(machine)))
    _run([*compiler, "-shared", "-pthread", *extra, *map(str, objects), "-o", str(library)])
    for made in objects:
        made.unlink()


def sources(machine: str) -> list[Path]:
    """Return the files to compile for `machine`, in the linker's order."""
    own = [*_OWN_FLAGS[machine]]
    others = {name for flags in _OWN_FLAGS.values() for name in flags}.difference(own)

    def place(source: Path) -> tuple[int, str]:
        return own.index(source.name) if source.name in own else -1, source.name

    return sorted((path for path in SOURCES.glob("*.cpp") if path.name not in others), key=place)


def this_machine() -> str:
    """Return the architecture that kernels are compiled for here. Raises BuildError."""
    machine = _SAME.get(platform.machine(), platform.machine())
    if machine not in _OWN_FLAGS or platform.system() != "Linux":
        raise BuildError(
            f"they are for Linux on x86-64 and aarch64, and this is {platform.system()} on {platform.machine()}"
        )
    return machine


def find_compiler() -> list[str]:
    """$CXX, or what is on the path. Raises BuildError."""
    this_machine()
    asked = shlex.split(os.environ.get("CXX", ""))
    for compiler in [asked] if asked else [[name] for name in _COMPILERS]:
        if shutil.which(compiler[0]):
            return compiler
    raise BuildError(
        f"there is no C++ compiler: neither of {', '.join(asked[:1] or _COMPILERS)} is on the path"
    )


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {_TIMEOUT_S} s") from error
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr.strip()}")


def _digest(extra: Sequence[str], machine: str) -> str:
    said = hashlib.sha256(repr((machine, _FLAGS, _OWN_FLAGS, tuple(extra))).encode())
    for source in sorted(SOURCES.iterdir()):
        said.update(source.name.encode() + b"\0" + source.read_bytes())
    return said.hexdigest()[:16]


if __name__ == "__main__":
    try:
        library_path()
    except BuildError as error:
        print(f"native kernels are left out: {error}")  # noqa: T201
