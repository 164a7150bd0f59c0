"""OpenAI's /v1/files and /v1/batches."""

import asyncio
import time
from functools import partial
from typing import Annotated, ClassVar, Literal

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import Field

from cluster.ingress.batches.batch_lines import first_model
from cluster.ingress.batches.batch_store import FINAL, BatchStore, Record
from cluster.ingress.batches.file_store import FileStore, StoredFile
from cluster.ingress.batches.upload_form import UploadForm
from cluster.ingress.bodies.body_model import NeutralFields, Strict, is_one_of
from cluster.ingress.generation.model_table import ModelTable
from cluster.ingress.http.http_route import HttpRoute
from cluster.ingress.http.list_pages import page_of
from cluster.ingress.tenants.access import Tenant
from cluster.store.store_port import Store
from core.errors import Overloaded, RequestError
from core.threads import in_thread

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
_MAX_FILE_BYTES = 200 << 20
_FORM_BYTES = 64 << 10
"""The bytes that the form around a file may add."""
MAX_UPLOAD_BYTES = _MAX_FILE_BYTES + _FORM_BYTES
"""What is in front of an ingress must let so much through."""
_SECONDS_PER_BYTE = 1e-6
MAX_UNFINISHED = 1000
"""Batches of one tenant that may wait or run."""
_FIRST_LINE_BYTES = 1 << 20
"""How much of a file is read to find its first line's model."""
_WINDOW_S = 24 * 3600
_FILE, _BATCH = "/v1/files/{id}", "/v1/batches/{id}"

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


BATCH_NEUTRAL: NeutralFields = {"output_expires_after": (is_one_of(), "files stay until they are deleted")}


class BatchRequest(Strict):
    neutral: ClassVar[NeutralFields] = BATCH_NEUTRAL

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


class BatchRoutes:
    def __init__(self, table: ModelTable, store: Store) -> None:
        self._table, self._answering = table, (answering := table.rows[0])
        self._files, self._batches = FileStore(store, answering.settings.file_store_bytes), BatchStore(store)

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute("POST", "/v1/files", self.upload),
            HttpRoute("GET", "/v1/files", self.files),
            HttpRoute("GET", _FILE, self.file),
            HttpRoute("GET", _FILE + "/content", self.content),
            HttpRoute("DELETE", _FILE, self.delete_file),
            HttpRoute("POST", "/v1/batches", self.create, BatchRequest),
            HttpRoute("GET", "/v1/batches", self.batches),
            HttpRoute("GET", _BATCH, self.batch),
            HttpRoute("POST", _BATCH + "/cancel", self.cancel),
        ]

    async def upload(self, http: HttpRequest) -> Response:
        """Read a multipart form with `file` and `purpose`, which is `batch`."""
        announced = http.headers.get("content-length", "")
        if not announced.isdigit():
            raise RequestError("an upload must say its content-length", status=411)
        if int(announced[:20]) > MAX_UPLOAD_BYTES:
            raise RequestError(f"a file has {_MAX_FILE_BYTES} bytes at the most", field="file", status=413)
        if not http.headers.get("content-type", "").startswith("multipart/form-data"):
            raise RequestError("content-type must be multipart/form-data", status=415)
        timeout_s = self._answering.settings.body_timeout_s + int(announced) * _SECONDS_PER_BYTE
        try:
            async with asyncio.timeout(timeout_s):
                return JSONResponse((await self._received(http, int(announced))).public())
        except TimeoutError:
            raise RequestError(f"the body did not come within {timeout_s:.0f} s", status=408) from None

    async def _received(self, http: HttpRequest, announced: int) -> StoredFile:
        file_id, owner = self._files.new_id(), http.state.holder.owner
        async with self._files.upload(file_id, owner, max(0, announced - _FORM_BYTES)) as upload:
            form = UploadForm(http.headers["content-type"], upload.write)
            async for piece in http.stream():
                await in_thread(partial(form.feed, piece))
                await upload.save()
            form.end()
            _check_form(form)
            described = StoredFile(
                id=file_id,
                tenant=owner,
                filename=form.filename or "file",
                purpose="batch",
                bytes=upload.num_bytes,
                created_at=int(time.time()),
            )
            return await upload.keep(described)

    async def files(self, http: HttpRequest) -> Response:
        purpose = http.query_params.get("purpose")
        found = await self._files.of(http.state.holder.owner)
        return page_of(http, [file.public() for file in found if purpose in (None, file.purpose)])

    async def file(self, http: HttpRequest) -> Response:
        return JSONResponse((await self._stored(http)).public())

    async def content(self, http: HttpRequest) -> Response:
        file = await self._stored(http)
        return StreamingResponse(
            self._files.contents(file.id),
            media_type="application/octet-stream",
            headers={"content-length": str(file.bytes)},
        )

    async def delete_file(self, http: HttpRequest) -> Response:
        file = await self._stored(http)
        for batch in await self._batches.unfinished(file.tenant):
            if batch["input_file_id"] == file.id:
                raise RequestError(f"the batch {batch['id']} reads {file.id}: cancel it first", status=409)
        await self._files.delete(file.id, file.tenant)
        return JSONResponse({"id": file.id, "object": "file", "deleted": True})

    async def create(self, http: HttpRequest) -> Response:
        body = await self._answering.read(http, BatchRequest)
        tenant = http.state.holder.owner
        file = await self._files.get(body.input_file_id, tenant, "input_file_id")
        if file.purpose != "batch":
            raise RequestError(
                f"the purpose of {file.id} is {file.purpose!r}, not 'batch'", field="input_file_id"
            )
        if len(await self._batches.unfinished(tenant)) >= MAX_UNFINISHED:
            raise Overloaded(f"{MAX_UNFINISHED} batches wait or run already", retry_after_s=60.0)
        now = int(time.time())
        record: Record = {
            "id": self._batches.new_id(),
            "object": "batch",
            "endpoint": body.endpoint,
            "model": await self._model_of(file, http.state.tenant),
            "errors": None,
            "input_file_id": body.input_file_id,
            "completion_window": body.completion_window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "in_progress_at": None,
            "expires_at": now + _WINDOW_S,
            **{
                f"{name}_at": None
                for name in ("finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
            },
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": body.metadata,
            "tenant": tenant,
        }
        await self._batches.create(record)
        return _batch(record)

    async def _model_of(self, file: StoredFile, tenant: Tenant) -> str:
        """Return the model whose ingresses run a batch: that of its first line, which the others need not share."""
        rows = self._table.seen_by(tenant) or [self._answering]
        if len(rows) > 1:
            named = first_model(await self._files.read(file.id, 0, _FIRST_LINE_BYTES))
            rows = [row for row in rows if named in row.settings.names] or rows
        return rows[0].settings.model_name

    async def batch(self, http: HttpRequest) -> Response:
        return _batch(await self._record(http))

    async def batches(self, http: HttpRequest) -> Response:
        found = await self._batches.of(http.state.holder.owner)
        return page_of(http, [_public(record) for record in found])

    async def cancel(self, http: HttpRequest) -> Response:
        record = await self._record(http)
        if record["status"] in FINAL:
            raise RequestError(f"the batch {record['id']} is {record['status']} already", status=409)
        await self._batches.ask_to_cancel(record["id"])
        return _batch(await self._record(http))

    async def _stored(self, http: HttpRequest) -> StoredFile:
        return await self._files.get(http.path_params["id"], http.state.holder.owner)

    async def _record(self, http: HttpRequest) -> Record:
        return await self._batches.get(http.path_params["id"], http.state.holder.owner)


class NoBatchRoutes:
    """The same routes where no store is named. They say what is missing."""

    def routes(self) -> list[HttpRoute]:
        paths = ("/v1/files", "/v1/files/{id:path}", "/v1/batches", "/v1/batches/{id:path}")
        return [
            HttpRoute(method, path, self.refuse) for path in paths for method in ("GET", "POST", "DELETE")
        ]

    async def refuse(self, http: HttpRequest) -> Response:
        """Refused: this server keeps no files."""
        raise RequestError(
            "this server keeps no files: start it with serve.store=sqlite:////FOLDER/store.db, or with PostgreSQL's URL",
            status=404,
            code="batches_off",
        )


def _check_form(form: UploadForm) -> None:
    """Raise RequestError where it is not what an upload has."""
    if more := set(form.fields) - {"file", "purpose"}:
        raise RequestError(
            f"{min(more)!r} is not supported: files stay until they are deleted", field=min(more)
        )
    if form.filename is None:
        raise RequestError("the form has no file", field="file")
    if (purpose := form.fields.get("purpose")) != "batch":
        raise RequestError(f"purpose must be 'batch', not {purpose!r}", field="purpose")


def _public(record: Record) -> Record:
    return {name: value for name, value in record.items() if name != "tenant"}


def _batch(record: Record) -> Response:
    return JSONResponse(_public(record))
