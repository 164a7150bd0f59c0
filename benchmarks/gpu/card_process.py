"""A process that does one kind of work on a card, as often as it is asked: `python -m benchmarks.gpu.card_process KIND`.

`tokens`: decode steps. `prompts`: prefill steps. `copies`: copies within the card. `opens`: reads another process's memory.
Commands come as lines of JSON, answers go out as such lines; it ends with its input."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
_MARK = "@"
"""What an answer begins with: libraries print what they like."""
Answer = dict[str, Any]


class CardProcess:
    """Such a process, as the one that has started it sees it."""

    def __init__(self, kind: str, env: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu.card_process", kind]
        self._kind = kind
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ready(self) -> None:
        """Wait until it can be asked. Raises RuntimeError where it has ended."""
        self.answer()

    def tell(self, what: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what} | arguments) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Answer:
        """Raises RuntimeError where it has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line[len(_MARK) :])
        raise RuntimeError(f"the process for {self._kind} has ended with {self._process.wait()}")

    def ask(self, what: str, **arguments: Any) -> Answer:
        self.tell(what, **arguments)
        return self.answer()


def _work_of(kind: str) -> dict[str, Callable[..., Answer]]:
    """Return what this process can be asked for."""
    from benchmarks.gpu import card_work  # noqa: PLC0415 (it needs a device, which who starts this one must not take)

    match kind:
        case "tokens":
            return {"run": card_work.Tokens().run}
        case "prompts":
            return {"run": card_work.Prompts().run}
        case "copies":
            copies = card_work.Copies()
            return {"run": copies.run, "short": copies.run_short, "share": copies.share}
        case _:
            return {"open": card_work.opened}


def main() -> None:
    work = _work_of(sys.argv[1])

    def say(answer: Answer) -> None:
        sys.stdout.write(f"{_MARK}{json.dumps(answer)}\n")
        sys.stdout.flush()

    say({})
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        say(work[command.pop("do")](**command))


if __name__ == "__main__":
    main()
