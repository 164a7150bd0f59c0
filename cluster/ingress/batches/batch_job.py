"""One batch, from its check to its end. It may be stopped anywhere and be resumed by another process."""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any

from cluster.ingress.batches.batch_lines import (
    MISSING_FILE,
    AnswerFile,
    InputLine,
    InputReader,
    Json,
    answer_files,
    body_of,
)
from cluster.ingress.batches.batch_store import BatchStore, Record
from cluster.ingress.batches.file_store import FileStore, StoredFile, whole_of
from cluster.store.store_port import Held, Store
from core.errors import RequestError, StoreUnavailable
from core.threads import in_thread
from core.whole_files import is_full

log = logging.getLogger(__name__)

Call = Callable[[Json], Awaitable[tuple[int, Mapping[str, str], Any]]]
"""A request's body -> (status, headers in lower case, the answer's JSON)."""
LOOK_S = 1.0
"""The time between two checks whether to go on. Progress is stored as often."""
MAX_WAIT_S = 30.0
"""How long a refused request waits at most before it is sent again."""


class BatchJob:
    def __init__(
        self,
        record: Record,
        call: Call,
        stores: tuple[Store, FileStore, BatchStore],
        held: Held,
        *,
        at_once: int,
        slots: asyncio.Semaphore,
    ) -> None:
        """Up to `at_once` of its requests run at a time, each in one of the `slots` that it shares with others. `held`: the
        batch's record is claimed."""
        self._record, self._call, self._held = record, call, held
        self._store, self._files, self._batches = stores
        self._at_once, self._slots = at_once, slots
        self._writing, self._waits = asyncio.Lock(), False
        self._answers, self._errors = (
            AnswerFile(self._files, file_id, record["tenant"]) for file_id in answer_files(record["id"])
        )

    async def run(self) -> None:
        """Run to its end. Cancelled, it leaves the rest to the process that claims it next. Raises LeaseLost where another one
        has, and StoreUnavailable before anything has run."""
        reader = await self._checked()
        if reader.errors:
            self._record["errors"] = {"object": "list", "data": reader.errors}
            await self._end("failed")
            return
        for file in (self._answers, self._errors):
            await file.open()
        await self._run(reader.lines)

    async def _checked(self) -> InputReader:
        reader = InputReader(self._record["endpoint"])
        file_id = self._record["input_file_id"]
        try:
            await self._files.get(file_id, self._record["tenant"])
        except RequestError:
            reader.errors.append(MISSING_FILE)
            return reader
        async for piece in self._files.contents(file_id):
            await in_thread(partial(reader.feed, piece))
        await in_thread(reader.end)
        return reader

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
                    self._errors.add(_line(line.custom_id, None, error))
        await self._until_stored(self._flush)
        await self._until_stored(self._give_out)
        await self._end(end)

    async def _watch(self, working: list["asyncio.Task[None]"]) -> str:
        """Wait for the status to end with: when all are answered, when time is up, or when somebody cancels."""
        record, waiting = self._record, set(working)
        while waiting:
            record["status"] = "in_progress"
            await self._until_stored(self._save, once=True)
            if record["cancelling_at"] is not None:
                return "cancelled"
            if _now() >= record["expires_at"]:
                return "expired"
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
        body: Json = {}

        async def read() -> None:
            raw = await self._files.read(self._record["input_file_id"], line.offset, line.size)
            body.update(body_of(raw))

        await self._until_stored(read)
        status, headers, answer = await self._patiently(body)
        response = {"status_code": status, "request_id": headers.get("x-request-id", ""), "body": answer}
        file = self._answers if status == 200 else self._errors
        file.add(_line(line.custom_id, response, None))
        await self._until_stored(self._flush)

    async def _patiently(self, body: Json) -> tuple[int, Mapping[str, str], Any]:
        """Call until there is an answer that another try would not change."""
        while True:
            status, headers, answer = await self._call(body)
            if "retry-after" not in headers:
                return status, headers, answer
            await asyncio.sleep(min(float(headers["retry-after"]), MAX_WAIT_S))

    async def _until_stored(self, work: Callable[[], Awaitable[None]], *, once: bool = False) -> None:
        """Do what needs the store, and again and again while its disk is full or it does not answer; `once`: give up then.
        Answers that are computed are not lost."""
        while True:
            try:
                await work()
                return
            except (OSError, StoreUnavailable) as error:
                if isinstance(error, OSError) and not is_full(error):
                    raise
                if not self._waits:
                    log.error("batch %s waits for the store: %s", self._record["id"], error)
                self._waits = True
            if once:
                return
            await asyncio.sleep(LOOK_S)

    async def _flush(self) -> None:
        """Store all answers that are not stored yet."""
        files = (self._answers, self._errors)
        async with self._writing:
            while records := [record for file in files for record in file.unsaved()]:
                await self._store.put(records, held=self._held)
                self._waits = False
                for file in files:
                    file.saved()

    async def _save(self) -> None:
        counts = self._record["request_counts"]
        counts["completed"], counts["failed"] = len(self._answers.answered), len(self._errors.answered)
        await self._batches.save(self._record, self._held)

    async def _give_out(self) -> None:
        """Publish the files of answers, where there are any."""
        record = self._record
        record["finalizing_at"] = _now()
        await self._save()
        named = (("output_file_id", "output", self._answers), ("error_file_id", "error", self._errors))
        for field, suffix, answers in named:
            if not answers.answered:
                continue
            record[field] = answers.id
            described = StoredFile(
                id=answers.id,
                tenant=record["tenant"],
                filename=f"{record['id']}_{suffix}.jsonl",
                purpose="batch_output",
                bytes=answers.num_bytes,
                created_at=_now(),
            )
            await self._store.put([whole_of(described)], held=self._held)

    async def _end(self, status: str) -> None:
        self._record |= {"status": status, f"{status}_at": _now()}
        await self._until_stored(partial(self._batches.save, self._record, self._held))
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
