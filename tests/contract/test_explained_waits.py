"""On the way of a step or of KV nothing waits for a device but where a comment says why."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "cluster/instance",
    "decode",
    "device",
    "engine",
    "kernels",
    "kvtransfer",
    "models",
    "parallel",
    "prefill",
)
WAIT = re.compile(r"(?<![\"\w])\w*[sS]ynchronize\(|\"\w*[sS]ynchronize\"")
_LINES_ABOVE = 2


def unexplained(text: str) -> Iterator[int]:
    """The numbers of lines that wait without a comment there or right above."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if WAIT.search(line) and not any(
            "# " in one for one in lines[max(0, number - _LINES_ABOVE) : number + 1]
        ):
            yield number + 1


def test_waits_are_few_and_explained() -> None:
    sources = {path: path.read_text() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    found = {path.relative_to(ROOT): list(unexplained(text)) for path, text in sources.items()}
    assert {path: lines for path, lines in found.items() if lines} == {}
    assert sum(len(WAIT.findall(text)) for text in sources.values()) >= 4, (
        "none is found: the test shows nothing"
    )


def test_a_wait_without_a_reason_is_found() -> None:
    assert list(unexplained("stream.synchronize()\n# The host reads it.\ntorch.cuda.synchronize()\n")) == [1]
    assert list(unexplained('self.call("streamSynchronize", 1)\n')) == [1]
