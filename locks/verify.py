"""`python locks/verify.py LOCK FILE...`: exit with 0 if the lock lists the SHA-256 of each file.

For torch, whose file pip chooses by itself: told the hashes, pip prefers an index's file, which may be gigabytes of CUDA, to a
build for processors that lies on a disk. TORCH_SHA256 in the environment names one more digest that is trusted."""

import hashlib
import os
import sys
from pathlib import Path


def main(lock: Path, files: list[Path]) -> int:
    known = {*lock.read_text().split(), f"--hash=sha256:{os.environ.get('TORCH_SHA256')}"}
    strange = {file: found for file in files if f"--hash=sha256:{(found := digest(file))}" not in known}
    for file, found in strange.items():
        print(
            f"{file.name} is not installed: {lock} does not list its SHA-256. To trust it, set TORCH_SHA256={found}"
        )
    return 1 if strange or not files else 0


def digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]]))
