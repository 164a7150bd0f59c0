"""The native library has no access out of bounds and no undefined behaviour that sanitisers see."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.build import BuildError, build_once, find_compiler

DRIVER = Path(__file__).with_name("sanitised.py")
FLAGS = ("-g1", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
RUNTIME = "libasan.so"


def runtime() -> str:
    """Where the compiler has the sanitiser's library, which must be loaded first; skips the test where it has none."""
    try:
        command = [*find_compiler(), f"-print-file-name={RUNTIME}"]
    except BuildError as error:
        pytest.skip(str(error))
    path = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    return path if os.path.isabs(path) else pytest.skip(f"this compiler has no {RUNTIME}")


@pytest.mark.slow
@pytest.mark.turns(6, number=1)
@pytest.mark.timeout(600)
def test_sanitisers_see_nothing(tmp_path: Path) -> None:
    first = runtime()
    library = build_once(tmp_path, FLAGS)
    environment = {
        **os.environ,
        "LD_PRELOAD": first,
        "PYTHONMALLOC": "malloc",
        # Python itself gives little back when it ends.
        "ASAN_OPTIONS": "detect_leaks=0",
        "OPENBLAS_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(library)], env=environment, capture_output=True, text=True, timeout=500, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.strip() == "clean"
