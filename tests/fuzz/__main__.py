"""Search for inputs that a parser does not expect.

    python -m tests.fuzz http --seconds 60          what it finds is written to build/fuzz/http
    python -m tests.fuzz http --reach               find the fewest of its inputs that reach all that was reached
    python -m tests.fuzz http --keep 20             keep the 20 shortest of those that are not kept yet, each below 512 bytes

Needs atheris: pip install atheris."""

import argparse
import logging
import shutil
import sys
import warnings
from hashlib import sha256
from pathlib import Path

import atheris

_PARSERS = [
    "baton.bench.sse",
    "cluster.ingress",
    "kvtransfer.transport.tcp",
    "kvtransfer.wire",
    "models.vision",
    "net",
    "python_multipart",
    "PIL",
]
with atheris.instrument_imports(include=_PARSERS):
    from tests.fuzz.targets import CORPUS, TARGETS, keep, kept

_MAX_KEPT_BYTES = 512
_WORK = Path("build/fuzz")


def _unpacked(name: str, into: Path) -> Path:
    """Write what is kept as a file for each input, which is what libFuzzer reads."""
    into.mkdir(parents=True, exist_ok=True)
    for data in kept(name) if (CORPUS / f"{name}.json").exists() else [b""]:
        (into / sha256(data).hexdigest()[:16]).write_bytes(data)
    return into


def _search(name: str, options: list[str], folders: list[Path]) -> None:
    found = _WORK / name

    def tried(data: bytes) -> None:
        try:
            TARGETS[name](data)
        except BaseException:
            path = found / f"find-{sha256(data).hexdigest()[:16]}"
            path.write_bytes(data)
            sys.stderr.write(f"\n==> {path} has {data!r}\n")
            raise

    atheris.Setup(["fuzz", f"-artifact_prefix={found}/", *options, *map(str, folders)], tried)
    atheris.Fuzz()


def _keep(name: str, num_more: int) -> None:
    """Add the shortest inputs that the last `--reach` has left."""
    least = sorted((path.read_bytes() for path in (_WORK / name / "least").iterdir()), key=len)
    old = kept(name) if (CORPUS / f"{name}.json").exists() else []
    more = [data for data in least if data not in old and len(data) <= _MAX_KEPT_BYTES]
    keep(name, [*old, *more[:num_more]])


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("target", choices=TARGETS)
    options.add_argument("--seconds", type=int, default=60)
    options.add_argument(
        "--reach", action="store_true", help="find the fewest inputs that reach all that was reached"
    )
    options.add_argument("--keep", type=int, metavar="NUMBER", help="keep so many of those")
    args = options.parse_args()
    logging.lastResort = None  # targets look at what is logged, and nobody else does
    warnings.simplefilter("ignore")
    corpus = _WORK / args.target / "corpus"
    if args.keep:
        _keep(args.target, args.keep)
        return
    _unpacked(args.target, corpus)
    if args.reach:
        least = _WORK / args.target / "least"
        shutil.rmtree(least, ignore_errors=True)
        least.mkdir(parents=True)
        _search(args.target, ["-merge=1", f"-max_len={_MAX_KEPT_BYTES}"], [least, corpus])
    _search(
        args.target,
        [f"-max_total_time={args.seconds}", "-max_len=2048", "-timeout=20", "-rss_limit_mb=3000"],
        [corpus],
    )


if __name__ == "__main__":
    sys.exit(main())
