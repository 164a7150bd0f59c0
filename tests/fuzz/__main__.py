"""Search for inputs that a parser does not expect.

    python -m tests.fuzz http --seconds 60          what it finds is written to build/fuzz/http
    python -m tests.fuzz http --keep 20             keep up to 20 inputs more, each below 512 bytes, that reach more lines

Needs atheris: pip install atheris."""

import argparse
import logging
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
    from tests.fuzz.reach import reaching_more
    from tests.fuzz.targets import TARGETS, keep, kept

_MAX_KEPT_BYTES = 512
_WORK = Path("build/fuzz")


def _unpacked(name: str, into: Path) -> Path:
    """Write what is kept as a file for each input, which is what libFuzzer reads."""
    into.mkdir(parents=True, exist_ok=True)
    for data in kept(name):
        (into / sha256(data).hexdigest()[:16]).write_bytes(data)
    return into


def _search(name: str, seconds: int) -> None:
    found = _WORK / name
    corpus = _unpacked(name, found / "corpus")
    options = [f"-max_total_time={seconds}", "-max_len=2048", "-timeout=20", "-rss_limit_mb=3000"]

    def tried(data: bytes) -> None:
        try:
            TARGETS[name](data)
        except BaseException:
            path = found / f"find-{sha256(data).hexdigest()[:16]}"
            path.write_bytes(data)
            sys.stderr.write(f"\n==> {path} has {data!r}\n")
            raise

    atheris.Setup(["fuzz", f"-artifact_prefix={found}/", *options, str(corpus)], tried)
    atheris.Fuzz()


def _keep(name: str, most: int) -> None:
    """Keep inputs that a search has left, if they reach more than those that are kept."""
    old = kept(name)
    found = [path.read_bytes() for path in (_WORK / name / "corpus").iterdir()]
    short = [data for data in found if len(data) <= _MAX_KEPT_BYTES]
    keep(name, [*old, *reaching_more(TARGETS[name], short, old)[:most]])


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("target", choices=TARGETS)
    options.add_argument("--seconds", type=int, default=60)
    options.add_argument("--keep", type=int, metavar="NUMBER", help="keep inputs of earlier searches")
    args = options.parse_args()
    logging.lastResort = None  # targets look at what is logged, and nobody else does
    warnings.simplefilter("ignore")
    if args.keep:
        _keep(args.target, args.keep)
    else:
        _search(args.target, args.seconds)


if __name__ == "__main__":
    sys.exit(main())
