"""One batch, from its check to its end. It may be stopped anywhere and be resumed by another process."""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any

from cluster.ingress.batches.batch_lines import AnswerFile, InputLine, Json, read_body, read_input
from cluster.ingress.batches.batch_store import BatchStore, Record
from cluster.ingress.batches.file_store import FileStore, StoredFile
from core.threads import in_thread
from core.whole_files import is_full

log = logging.getLogger(__name__)

Call = Callable[[Json], Awaitable[tuple[int, Mapping[str, str], Any]]]
"""A request's body -> (status, headers in lower case, the answer's JSON)."""
LOOK_S = 1.0
"""The time between two checks whether to go on. Progress is written as often."""
MAX_WAIT_S = 30.0
"""How long a refused request waits at most before it is sent again."""


class BatchJob:
    def __init__(
        self,
        record: Record,
        call: Call,
        files: FileStore,
        batches: BatchStore,
        at_once: int,
        slots: asyncio.Semaphore,
    ) -> None:
        """Up to `at_once` of its requests run at a time, each in one of the `slots` that it shares with others."""
        self._record, self._call, self._files, self._batches = record, call, files, batches
        self._at_once, self._slots = at_once, slots
        self._writing, self._is_full = asyncio.Lock(), False
        self._open_files = ExitStack()
        self._input = files.path(record["input_file_id"])
        self._ids = (
            record["id"].replace("batch_", "file-"),
            f"file-{uuid.UUID(record['id'][6:]).int ^ 1:032x}",
        )
        """The files of answers and of errors. They are named after the batch, so that a process that resumes it finds them."""

    async def run(self) -> None:
        """Run to its end. Cancelled, it leaves the rest to the process that claims it next."""
        record = self._record
        try:
            lines, errors = await asyncio.to_thread(read_input, self._input, record["endpoint"])
        except FileNotFoundError:
            lines, errors = (
                [],
                [
                    {
                        "code": "missing_file",
                        "message": "the input file was deleted",
                        "param": None,
                        "line": None,
                    }
                ],
            )
        if errors:
            record["errors"] = {"object": "list", "data": errors}
            await self._end("failed")
            return
        with self._open_files:
            await self._until_room(self._open)
            await self._run(lines)

    def _open(self) -> None:
        self._open_files.close()
        self._answers, self._errors = (
            self._open_files.enter_context(closing(AnswerFile(self._files.path(file_id))))
            for file_id in self._ids
        )

    async def _run(self, lines: list[InputLine]) -> None:
        record = self._record
        record["in_progress_at"] = record["in_progress_at"] or _now()
        record["request_counts"]["total"] = len(lines)
        done = self._answers.answered | self._errors.answered
        left = iter([line for line in lines if line.custom_id not in done])
        working = [asyncio.create_task(self._work(left)) for _ in range(self._at_once)]
        try:
            end = await self._watch(working)
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
        if end == "expired":
            done = self._answers.answered | self._errors.answered
            for line in lines:
                if line.custom_id not in done:
                    error = {
                        "code": "batch_expired",
                        "message": "the batch's time ended before this request was run",
                    }
                    await self._until_room(partial(self._errors.add, _line(line.custom_id, None, error)))
        await self._until_room(self._give_out)
        await self._end(end)

    async def _watch(self, working: list["asyncio.Task[None]"]) -> str:
        """Wait for the status to end with: when all are answered, when time is up, or when somebody cancels."""
        record, waiting = self._record, set(working)
        while waiting:
            if self._batches.cancel_asked_at(record["id"]) is not None:
                return "cancelled"
            if _now() >= record["expires_at"]:
                return "expired"
            record["status"] = "in_progress"
            await self._until_room(self._save, once=True)
            ended, waiting = await asyncio.wait(waiting, timeout=LOOK_S, return_when=asyncio.FIRST_EXCEPTION)
            for task in ended:
                task.result()
        return "completed"

    async def _work(self, left: Iterator[InputLine]) -> None:
        while True:
            async with self._slots:
                if (line := next(left, None)) is None:
                    return
                await self._answer(line)

    async def _answer(self, line: InputLine) -> None:
        body = await asyncio.to_thread(read_body, self._input, line)
        status, headers, answer = await self._patiently(body)
        response = {"status_code": status, "request_id": headers.get("x-request-id", ""), "body": answer}
        file = self._answers if status == 200 else self._errors
        await self._until_room(partial(file.add, _line(line.custom_id, response, None)))

    async def _patiently(self, body: Json) -> tuple[int, Mapping[str, str], Any]:
        """Call until there is an answer that another try would not change."""
        while True:
            status, headers, answer = await self._call(body)
            if "retry-after" not in headers:
                return status, headers, answer
            await asyncio.sleep(min(float(headers["retry-after"]), MAX_WAIT_S))

    async def _until_room(self, write: Callable[[], None], *, once: bool = False) -> None:
        """Write, and again and again while the disk is full; `once`: give up then. Answers that are computed are not lost.
        A cancelled caller still waits for the thread that writes, so that no file is closed and no claim given back."""
        while True:
            try:
                async with self._writing:
                    await in_thread(write)
                self._is_full = False
                return
            except OSError as error:
                if not is_full(error):
                    raise
                if not self._is_full:
                    log.error("batch %s waits for room on the disk: %s", self._record["id"], error)
                self._is_full = True
            if once:
                return
            await asyncio.sleep(LOOK_S)

    def _save(self) -> None:
        counts = self._record["request_counts"]
        counts["completed"], counts["failed"] = len(self._answers.answered), len(self._errors.answered)
        self._answers.sync()
        self._errors.sync()
        self._batches.save(self._record)

    def _give_out(self) -> None:
        """Publish the files of answers, where there are any."""
        record = self._record
        record["finalizing_at"] = _now()
        self._save()
        named = (("output_file_id", "output", self._answers), ("error_file_id", "error", self._errors))
        for file_id, (field, suffix, answers) in zip(self._ids, named, strict=True):
            if not answers.answered:
                with suppress(FileNotFoundError):
                    self._files.path(file_id).unlink()
                continue
            record[field] = file_id
            self._files.describe(
                StoredFile(
                    id=file_id,
                    tenant=record["tenant"],
                    filename=f"{record['id']}_{suffix}.jsonl",
                    purpose="batch_output",
                    bytes=answers.num_bytes,
                    created_at=_now(),
                )
            )

    async def _end(self, status: str) -> None:
        self._record |= {"status": status, f"{status}_at": _now()}
        if status == "cancelled":
            self._record["cancelling_at"] = self._batches.cancel_asked_at(self._record["id"])
        await self._until_room(partial(self._batches.save, self._record))
        log.info("batch %s is %s: %s", self._record["id"], status, json.dumps(self._record["request_counts"]))


def _line(custom_id: str, response: Json | None, error: Json | None) -> Json:
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }


def _now() -> int:
    return int(time.time())
