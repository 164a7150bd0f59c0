"""A batch's lines: the requests, checked before any is run, and the answers, which outlive the process that wrote them."""

import json
import uuid
from dataclasses import dataclass
from typing import Any

from cluster.ingress.batches.file_store import FileStore, draft_of, piece_of
from cluster.store.store_port import StoreRecord

MAX_LINES = 50_000
_MAX_ERRORS = 100
Json = dict[str, Any]


MISSING_FILE: Json = {
    "code": "missing_file",
    "message": "the input file was deleted",
    "param": None,
    "line": None,
}
"""What is wrong with a batch whose input is gone."""


@dataclass(frozen=True, slots=True)
class InputLine:
    custom_id: str
    offset: int
    size: int


class InputReader:
    """Checks a batch's input file, piece by piece. Nothing may be run where anything is wrong."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._begun: list[bytes] = []
        """The parts of a line whose end has not come yet."""
        self._offset = self._num_lines = 0
        self._seen: set[str] = set()
        self.lines: list[InputLine] = []
        self.errors: list[Json] = []
        """What is wrong with the first lines that are, as OpenAI says it."""

    def feed(self, piece: bytes) -> None:
        *whole, rest = piece.split(b"\n")
        for line in whole:
            self._read(b"".join((*self._begun, line, b"\n")))
            self._begun = []
        self._begun.append(rest)

    def end(self) -> None:
        if last := b"".join(self._begun):
            self._read(last)
        if not self.lines and not self.errors:
            self.errors.append(_error("empty_file", "the input file has no requests", None))

    def _read(self, raw: bytes) -> None:
        offset, self._offset = self._offset, self._offset + len(raw)
        self._num_lines += 1
        if not raw.strip() or len(self.errors) >= _MAX_ERRORS or len(self.lines) > MAX_LINES:
            return
        problem = _problem(raw, self._endpoint, self._seen)
        if isinstance(problem, str):
            self.lines.append(InputLine(problem, offset, len(raw)))
            self._seen.add(problem)
        else:
            self.errors.append({**problem, "line": self._num_lines})
        if len(self.lines) > MAX_LINES:
            self.errors.append(
                _error("too_many_tasks", f"a batch has {MAX_LINES} requests at the most", None)
            )


def body_of(raw: bytes) -> Json:
    """Return the body of a line in which nothing is wrong."""
    return json.loads(raw)["body"]


def first_model(start: bytes) -> str | None:
    """Return the model of a file's first line, from the file's `start`; None where it has none that can be read."""
    line, *_ = start.lstrip().partition(b"\n")
    try:
        model = json.loads(line)["body"]["model"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    return model if isinstance(model, str) else None


def _problem(raw: bytes, endpoint: str, seen: set[str]) -> str | Json:
    """Return the line's custom_id, or what is wrong with the line."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError) as error:
        return _error("invalid_json_line", f"this line is no JSON: {error}", None)
    if not isinstance(line, dict):
        return _error("invalid_json_line", "this line is no JSON object", None)
    custom_id, body = line.get("custom_id"), line.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        return _error("missing_required_parameter", "custom_id must be a text", "custom_id")
    if custom_id in seen:
        return _error("duplicate_custom_id", f"custom_id {custom_id!r} was used by a line above", "custom_id")
    if line.get("method") != "POST":
        return _error("invalid_method", f"method must be POST, not {line.get('method')!r}", "method")
    if line.get("url") != endpoint:
        return _error(
            "invalid_url", f"url must be the batch's endpoint {endpoint}, not {line.get('url')!r}", "url"
        )
    if not isinstance(body, dict):
        return _error("invalid_request", "body must be a JSON object", "body")
    if body.get("stream") or body.get("background"):
        return _error(
            "invalid_request", "an answer in a batch is neither streamed nor in the background", "body"
        )
    return custom_id


def _error(code: str, message: str, param: str | None) -> Json:
    return {"code": code, "message": message, "param": param, "line": None}


def answer_files(batch_id: str) -> tuple[str, str]:
    """Return the ids of a batch's files of answers and of errors. A process that resumes the batch finds them by its id."""
    return batch_id.replace("batch_", "file-"), f"file-{uuid.UUID(batch_id[6:]).int ^ 1:032x}"


class AnswerFile:
    """Answers as they come, one a line, in a file that is a draft until the batch ends."""

    def __init__(self, files: FileStore, file_id: str, owner: str) -> None:
        self._files, self.id, self._owner = files, file_id, owner
        self.answered: set[str] = set()
        """Whose answers are stored."""
        self.num_bytes = 0
        self._added: list[Json] = []
        self._writing: list[Json] = []

    async def open(self) -> None:
        """Read what a process that ran the batch before has stored."""
        rest = b""
        async for piece in self._files.contents(self.id):
            self.num_bytes += len(piece)
            *whole, rest = (rest + piece).split(b"\n")
            self.answered |= {json.loads(line)["custom_id"] for line in whole}

    def add(self, answer: Json) -> None:
        """Take an answer, to be stored with the next `unsaved`."""
        self._added.append(answer)

    def unsaved(self) -> list[StoreRecord]:
        """Return the records of the answers that are not stored, and the same ones again until `saved` says that they are: a
        write whose outcome is not known is harmless then."""
        if not self._writing:
            self._writing, self._added = self._added, []
        if not self._writing:
            return []
        text = self._text
        draft = draft_of(self.id, self._owner, self.num_bytes + len(text), lives_s=None)
        return [draft, piece_of(self.id, self.num_bytes, text)]

    def saved(self) -> None:
        """Note that what `unsaved` returned is stored."""
        self.num_bytes += len(self._text)
        self.answered |= {answer["custom_id"] for answer in self._writing}
        self._writing = []

    @property
    def _text(self) -> bytes:
        return b"".join(json.dumps(answer).encode() + b"\n" for answer in self._writing)
