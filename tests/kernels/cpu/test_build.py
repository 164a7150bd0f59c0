"""The library is built once for its sources, and a machine that cannot build it computes without."""

import os
import platform
import re
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernels.cpu.build import (
    SOURCES,
    BuildError,
    build_once,
    find_compiler,
    library_path,
    sources,
    this_machine,
)

ROOT = Path(__file__).resolve().parents[3]
AVX512 = re.compile(r"%zmm|%[xy]mm(1[6-9]|2\d|3[01])|\{%k")
COUNTING = """#!/bin/sh
echo run >> "$RUNS"
for word; do last=$word; done
: > "$last"
"""
WITHOUT = """
import logging, torch
logging.basicConfig(format="%(message)s")
from core.errors import UnsupportedModel
from models.families.table import read_spec
from models.files.hub import resolve
from models.registry import LoadOptions, choose_weights, load_model

folder, cpu = resolve("embedded"), torch.device("cpu")
spec = read_spec(folder)
print("weights", choose_weights(spec, "auto", "none", cpu, deterministic=False))
try:
    choose_weights(spec, "auto", "int8", cpu, deterministic=False)
except UnsupportedModel as error:
    print("refused", error)
load_model(folder, "auto", cpu)
load_model(folder, "auto", cpu, options=LoadOptions(deterministic=True))
print("loaded")
"""


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_of_all_that_ask_at_once_one_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """A compiler that writes what it is told to write, and counts."""
    caplog.set_level("INFO", "kernels.cpu.build")
    monkeypatch.setenv("CXX", str(executable(tmp_path / "compiler", COUNTING)))
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    with ThreadPoolExecutor(4) as threads:
        [path] = set(threads.map(lambda _: build_once(tmp_path / "cache"), range(4)))
    assert path.exists()
    assert len((tmp_path / "runs").read_text().splitlines()) == len(sources(this_machine())) + 1
    assert {file.suffix for file in path.parent.iterdir()} == {".so", ".lock"}
    assert "native kernels are compiled into" in caplog.text
    caplog.clear()
    assert build_once(tmp_path / "cache") == path
    assert caplog.text == ""
    assert build_once(tmp_path / "cache", ["-g"]) != path
    other = "aarch64" if this_machine() == "x86_64" else "x86_64"
    assert build_once(tmp_path / "cache", compiler=[str(tmp_path / "compiler")], machine=other) != path


def test_an_architecture_s_own_files_are_compiled_for_no_other():
    x86, arm = ({path.name for path in sources(machine)} for machine in ("x86_64", "aarch64"))
    assert x86 | arm == {path.name for path in SOURCES.glob("*.cpp")}
    assert arm - x86 == {"isa_arm.cpp", "neon.cpp"}
    assert {"isa_x86.cpp", "avx2.cpp", "amx.cpp"} < x86 - arm
    assert {"linear.cpp", "layers.cpp", "packing.cpp"} < x86 & arm


@pytest.mark.parametrize(
    ("machine", "found"),
    [("AMD64", "x86_64"), ("arm64", "aarch64"), ("aarch64", "aarch64"), ("riscv64", None)],
)
def test_processors_that_have_no_kernels_are_named(
    monkeypatch: pytest.MonkeyPatch, machine: str, found: str | None
):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    if found is not None:
        assert this_machine() == found
        return
    with pytest.raises(BuildError, match="Linux on x86-64 and aarch64, and this is Linux on riscv64"):
        find_compiler()


def test_a_compiler_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    failing = executable(tmp_path / "failing", "#!/bin/sh\necho no such vector >&2\nexit 1\n")
    monkeypatch.setenv("CXX", str(failing))
    with pytest.raises(BuildError, match="no such vector"):
        build_once(tmp_path / "cache")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler: neither of no-such-compiler"):
        build_once(tmp_path / "cache")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="test_arm.py looks at ARM's library")
def test_functions_that_all_files_share_have_no_instructions_of_a_larger_set():
    """The linker keeps one copy of each. On a processor without AVX-512 the copy of a file for AVX-512 ends the process."""
    library = str(library_path())
    names = subprocess.check_output(["nm", "--defined-only", library], text=True).splitlines()
    shared = {name for _, kind, name in map(str.split, names) if kind in "WVu"}
    assert shared
    code = subprocess.check_output(["objdump", "-d", "--no-show-raw-insn", library], text=True)
    found = {name for name, body in re.findall(r"<(\S+)>:\n((?:.+\n)+)", code) if AVX512.search(body)}
    assert found, "those of the files for AVX-512"
    assert not found & shared


@pytest.mark.slow
def test_without_a_compiler_pytorch_computes_and_says_so_once(tmp_path: Path):
    environment = {**os.environ, "CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "weights full" in done.stdout
    assert "refused model.quantization is int8, which needs native kernels" in done.stdout
    assert "loaded" in done.stdout
    assert done.stderr.count("there are no native kernels here") == 1
