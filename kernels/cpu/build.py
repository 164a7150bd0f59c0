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
_OWN_FLAGS: Final = {
    "avx2.cpp": _AVX2,
    "avx512.cpp": (*_AVX2, *_AVX512),
    "avx512_bf16.cpp": (*_AVX2, *_AVX512, "-mavx512bf16"),
    "amx_emulated.cpp": (*_AVX2, *_AVX512, "-mavx512bf16"),
    "amx.cpp": (*_AVX2, *_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
}
"""The flags of the files that have code for one instruction set, the smaller sets first; the others run on every x86-64."""
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


def build_once(folder: Path, extra: Sequence[str] = ()) -> Path:
    """The library of these sources in `folder`. Of processes that ask at once one builds, and the others wait. `extra`: flags
    behind the others. Raises BuildError."""
    path = folder / f"{_digest(extra)}-{NAME}"
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _log.info("native kernels are compiled into %s, or awaited: once, for about a minute", path)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                with tempfile.TemporaryDirectory(dir=folder) as made:
                    compile_to(Path(made) / NAME, extra)
                    os.replace(Path(made) / NAME, path)
    except OSError as error:
        raise BuildError(f"{folder} cannot be written: {error}") from error
    return path


def compile_to(library: Path, extra: Sequence[str] = ()) -> None:
    """Raises BuildError."""
    compiler = find_compiler()
    folder = library.parent

    def compile_one(source: Path) -> Path:
        made = folder / f"{source.stem}.o"
        flags = (*_FLAGS, *_OWN_FLAGS.get(source.name, ()), *extra)
        _run([*compiler, *flags, "-c", str(source), "-o", str(made)])
        return made

    # Of functions that several files have, such as the standard library's, the linker takes the first: one that all may run.
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = list(threads.map(compile_one, sorted(SOURCES.glob("*.cpp"), key=_place)))
    _run([*compiler, "-shared", "-pthread", *extra, *map(str, objects), "-o", str(library)])
    for made in objects:
        made.unlink()


def _place(source: Path) -> tuple[int, str]:
    return [*_OWN_FLAGS].index(source.name) if source.name in _OWN_FLAGS else -1, source.name


def find_compiler() -> list[str]:
    """$CXX, or what is on the path. Raises BuildError."""
    if platform.machine() not in ("x86_64", "AMD64") or platform.system() != "Linux":
        raise BuildError(
            f"they are for Linux on x86-64, and this is {platform.system()} on {platform.machine()}"
        )
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


def _digest(extra: Sequence[str]) -> str:
    said = hashlib.sha256(repr((_FLAGS, [*_OWN_FLAGS.items()], tuple(extra))).encode())
    for source in sorted(SOURCES.iterdir()):
        said.update(source.name.encode() + b"\0" + source.read_bytes())
    return said.hexdigest()[:16]


if __name__ == "__main__":
    try:
        library_path()
    except BuildError as error:
        print(f"native kernels are left out: {error}")  # noqa: T201
