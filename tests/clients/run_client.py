"""Other people's programs, installed for a test and run beside it.

Which releases, and their hashes, is in `npm/` beside this file and in `locks/test-*.txt`."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

NPM = Path(__file__).parent / "npm"
LOCKS = Path(__file__).parents[2] / "locks"


def install_npm(name: str, folder: Path) -> None:
    """Install the packages of `npm/NAME` below `folder`."""
    for file in ("package.json", "package-lock.json"):
        shutil.copy(NPM / name / file, folder)
    install(["npm", "ci", "--no-audit", "--no-fund"], folder)


def install_python(name: str, folder: Path, patience_s: float = 200) -> None:
    """Install what `locks/test-NAME.txt` pins into `folder`."""
    install_locked(f"test-{name}", folder, patience_s)


def install_locked(lock: str, folder: Path, patience_s: float = 200) -> None:
    folder.mkdir(exist_ok=True)
    wanted = ["--no-deps", "--require-hashes", "--requirement", str(LOCKS / f"{lock}.txt")]
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--target", str(folder)]
    install([*uv, *wanted], folder, patience_s)


def install(command: Sequence[str], folder: Path, patience_s: float = 200) -> None:
    """Skips the test where the packages cannot be had, or not so soon. With CI set it fails instead."""
    without = pytest.fail if os.environ.get("CI") else pytest.skip
    for is_last in (False, True):  # a registry may fail once
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=patience_s, check=False
            )
        except subprocess.TimeoutExpired:
            without(f"cannot be installed here within {patience_s:g} s")
        if not done.returncode:
            return
        if is_last:
            without(f"cannot be installed here: {done.stderr[-300:]}")


async def said(
    command: Sequence[str], folder: Path, *, without: Collection[str] = (), **environment: str
) -> list[str]:
    """The lines that the program prints in `folder`. It inherits variables but for those that begin as `without` says."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(tuple(without))}
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=inherited | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        out, errors = await asyncio.wait_for(process.communicate(), 120)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, (out + errors).decode()[-3000:]
    return out.decode().splitlines()
