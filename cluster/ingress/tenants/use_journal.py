"""Files in which an ingress writes what was used before a client learns that its answer has ended.

What a killed process has written is in its file. Another process finds it by the lock that ended with its writer."""

import fcntl
import json
import logging
import os
import uuid
from collections.abc import Generator
from pathlib import Path

from cluster.store.usage_port import UsageCounts, UsedBy

log = logging.getLogger(__name__)

Use = tuple[UsedBy, UsageCounts]
_SUFFIX = ".uses"
_LONGEST_BYTES = 4 << 20


class UseJournal:
    """One writer's entries, numbered from 0. Without a folder they are only counted."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._begin()

    def write(self, use: Use) -> None:
        """Write one entry. Where that fails it is logged, and a kill of this process may lose the entry."""
        number = self.num_entries
        self.num_entries += 1
        if self._folder is None:
            return
        try:
            if self._file is None:
                self._file = _new_file(self._folder / f"{self.writer}{_SUFFIX}")
            self._num_bytes += os.write(self._file, _line(number, use))
        except OSError as error:
            log.error("what was used cannot be written to %s: %s", self._folder, error)

    def settled(self) -> None:
        """Begin another file where this one is long. All entries are in the database."""
        if self._num_bytes > _LONGEST_BYTES:
            self.close()
            self._begin()

    def close(self) -> None:
        """Remove the file. All entries are in the database."""
        if self._file is not None and self._folder is not None:
            (self._folder / f"{self.writer}{_SUFFIX}").unlink(missing_ok=True)
            os.close(self._file)
            self._file = None

    def _begin(self) -> None:
        self.writer, self.num_entries = uuid.uuid4().hex, 0
        self._file: int | None = None
        self._num_bytes = 0


def left_by_the_dead(folder: Path) -> Generator[tuple[str, dict[int, Use]]]:
    """Yield the writer and the entries, by number, of each file whose writer has ended. The file is removed after its turn."""
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        try:
            file = _locked(path, 0)
        except OSError:  # its writer lives, or another process has it, or has removed it
            continue
        try:
            lines = path.read_bytes().splitlines(keepends=True)
            # The last line may be half of one: its client was not told of the end.
            yield path.stem, dict(_read(line) for line in lines if line.endswith(b"\n"))
            path.unlink(missing_ok=True)
        except FileNotFoundError:
            continue
        finally:
            os.close(file)


def _new_file(path: Path) -> int:
    """Create a file that nobody sees before it is locked: whoever looks for files of the dead would take it for one."""
    new = path.with_suffix(".new")
    file = _locked(new, os.O_CREAT | os.O_EXCL)
    new.rename(path)
    return file


def _locked(path: Path, flags: int) -> int:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | flags, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file


def _line(number: int, use: Use) -> bytes:
    by, counts = use
    kept = [number, by.start, by.tenant, by.key_id, by.model, by.slo_class, by.batch]
    kept += [counts.num_requests, counts.prompt_tokens, counts.cached_tokens, counts.output_tokens]
    return json.dumps([*kept, counts.reasoning_tokens, counts.images, counts.sequence_s]).encode() + b"\n"


def _read(line: bytes) -> tuple[int, Use]:
    number, *values = json.loads(line)
    return number, (UsedBy(*values[:6]), UsageCounts(*values[6:]))
