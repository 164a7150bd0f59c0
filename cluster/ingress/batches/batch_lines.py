"""A batch's lines: the requests, checked before any is run, and the answers, which outlive the process that wrote them."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_LINES = 50_000
_MAX_ERRORS = 100
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class InputLine:
    custom_id: str
    offset: int
    size: int


def read_input(path: Path, endpoint: str) -> tuple[list[InputLine], list[Json]]:
    """Return (lines, what is wrong with the first of them, as OpenAI says it). Blocks. Nothing may be run where anything is
    wrong."""
    lines: list[InputLine] = []
    errors: list[Json] = []
    seen: set[str] = set()
    for number, (offset, raw) in enumerate(_lines(path), 1):
        if not raw.strip():
            continue
        problem = _problem(raw, endpoint, seen)
        if isinstance(problem, str):
            lines.append(InputLine(problem, offset, len(raw)))
            seen.add(problem)
        else:
            errors.append({**problem, "line": number})
        if len(lines) > MAX_LINES:
            errors.append(_error("too_many_tasks", f"a batch has {MAX_LINES} requests at the most", None))
        if len(errors) >= _MAX_ERRORS or len(lines) > MAX_LINES:
            break
    if not lines and not errors:
        errors.append(_error("empty_file", "the input file has no requests", None))
    return lines, errors


def read_body(path: Path, line: InputLine) -> Json:
    with path.open("rb") as file:
        file.seek(line.offset)
        return json.loads(file.read(line.size))["body"]


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    offset = 0
    with path.open("rb") as file:
        for raw in file:
            yield offset, raw
            offset += len(raw)


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


class AnswerFile:
    """Answers as they come, one a line. An unfinished line of a process that was killed is cut off when the next one opens the
    file."""

    def __init__(self, path: Path) -> None:
        self.answered: set[str] = set()
        self.num_bytes = 0
        path.touch()
        for _, raw in _lines(path):
            if not raw.endswith(b"\n"):
                break
            self.answered.add(json.loads(raw)["custom_id"])
            self.num_bytes += len(raw)
        os.truncate(path, self.num_bytes)
        self._file = path.open("ab", buffering=0)

    def add(self, answer: Json) -> None:
        """Raises OSError where the disk has no room. The file is then as before."""
        raw = json.dumps(answer).encode() + b"\n"
        left = memoryview(raw)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(self.num_bytes)
            raise
        self.num_bytes += len(raw)
        self.answered.add(answer["custom_id"])

    def sync(self) -> None:
        """Return when all of it would survive a crash of the machine."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
