"""What compiling each kernel for each architecture has given, by the digest of what it was compiled from.

`python -m tests.kernels.known_builds` records all that is not known, and forgets what no kernel is compiled from any more."""

import json
from dataclasses import fields
from pathlib import Path

from kernels.triton.aot import Build, compile_launches
from kernels.triton.launches import LAUNCHES

FILE = Path(__file__).with_name("known_builds.json")
_NAMES = [field.name for field in fields(Build)]


def known_builds() -> dict[str, Build]:
    lines: dict[str, list[object]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return {digest: Build(**dict(zip(_NAMES, line, strict=True))) for digest, line in lines.items()}  # type: ignore[arg-type]


def main() -> None:
    known, builds = known_builds(), dict[str, Build]()
    for launch in LAUNCHES:
        for capability in launch.capabilities:
            builds |= compile_launches(capability, launch.run, known)
    lines = {digest: [getattr(build, name) for name in _NAMES] for digest, build in builds.items()}
    rows = (f"{json.dumps(digest)}: {json.dumps(line)}" for digest, line in sorted(lines.items()))
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
