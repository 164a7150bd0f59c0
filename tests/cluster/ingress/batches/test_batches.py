"""Files and batches through the openai SDK, over a fake generator: stopped anywhere, each line is answered once."""

import asyncio
import contextlib
import io
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import httpx
import openai
import pytest
from openai.types import Batch
from pydantic import SecretStr

from cluster.ingress.batches import batch_runner
from cluster.ingress.batches.batch_routes import Endpoint
from cluster.ingress.batches.batch_runner import BatchRunner
from cluster.ingress.batches.batch_store import BatchStore, stored_batch
from cluster.ingress.batches.file_store import FileStore
from cluster.ingress.http_app import create_app
from cluster.ingress.telemetry.observers import make_observers
from cluster.ingress.tenants.access import Access, Rules, TenantRules
from cluster.store.sql_store import SqlStore
from core.errors import Overloaded, ReplicaLost
from core.types import Request, Slo
from tests.cluster.ingress.api.fakes import NAME, ByteTokenizer, FakeGenerator
from tests.cluster.ingress.api.harness import SETTINGS
from tests.patience import PATIENCE_S

CLASSES = {"standard": Slo(), "batch": Slo(name="batch", priority=-1)}
OPEN = Rules(CLASSES, {"": TenantRules()})
CHATS = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "LOOK_S", 0.01)


class Server:
    """An ingress with batches; several may share a store: a folder of SQLite's, or a URL."""

    def __init__(
        self,
        where: Path | str,
        generator: FakeGenerator,
        rules: Rules = OPEN,
        key: str = "k",
        room: int = 1 << 20,
        timeout_s: float = PATIENCE_S,
    ) -> None:
        self.generator, self.access = generator, Access(rules)
        url = where if isinstance(where, str) else f"sqlite:///{where / 'store.db'}"
        self.store = SqlStore(lambda: url, timeout_s)
        self.files, self.batches = FileStore(self.store, room), BatchStore(self.store)
        settings = replace(SETTINGS, file_store_bytes=room)
        self.app = create_app(
            generator, ByteTokenizer(), settings, self.access, make_observers(NAME), self.store
        )
        self.runner = BatchRunner(self.app, self.store, self.access, NAME, at_once=4, slo_class="batch")
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://api")
        self.client = openai.AsyncOpenAI(
            base_url="http://api/v1", api_key=key, http_client=self.http, max_retries=0
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Server"]:
        task = asyncio.create_task(self.runner.run())
        try:
            yield self
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def submit(self, lines: Sequence[Any], endpoint: str = CHATS, **options: Any) -> Batch:
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        file = await self.client.files.create(file=io.BytesIO(text.encode()), purpose="batch")
        return await self.client.batches.create(
            input_file_id=file.id,
            endpoint=endpoint,  # type: ignore[arg-type]
            completion_window="24h",
            **options,
        )

    async def ended(self, batch_id: str) -> Batch:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                batch = await self.client.batches.retrieve(batch_id)
                if batch.status in ("completed", "failed", "expired", "cancelled"):
                    return batch
                await asyncio.sleep(0.01)

    async def answers(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        return [json.loads(line) for line in (await self.client.files.content(file_id)).text.splitlines()]


def line(number: int, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"question {number}"}]
    return {
        "custom_id": f"c{number}",
        "method": "POST",
        "url": CHATS,
        "body": {"model": NAME, "messages": messages, **body},
    }


async def test_a_batch_is_answered_line_by_line(tmp_path: Path) -> None:
    async with Server(tmp_path, FakeGenerator("fine")).running() as server:
        lines = [*(line(n) for n in range(40)), line(40, temperature=9), line(41, model="other")]
        batch = await server.submit(lines, metadata={"for": "me"})
        assert batch.status == "validating"
        done = await server.ended(batch.id)
        assert done.status == "completed"
        assert done.request_counts is not None
        assert done.request_counts.model_dump() == {"total": 42, "completed": 40, "failed": 2}
        assert done.metadata == {"for": "me"}
        good = await server.answers(done.output_file_id)
        assert Counter(each["custom_id"] for each in good) == Counter(f"c{n}" for n in range(40))
        assert {each["response"]["body"]["choices"][0]["message"]["content"] for each in good} == {"fine"}
        bad = await server.answers(done.error_file_id)
        assert {each["custom_id"]: each["response"]["status_code"] for each in bad} == {
            "c40": 400,
            "c41": 404,
        }
        assert {request.slo.name for request in server.generator.requests} == {"batch"}
        assert set(server.generator.routes) == {"/v1/batches"}
        assert done.output_file_id is not None
        described = await server.client.files.retrieve(done.output_file_id)
        assert (described.purpose, described.filename) == ("batch_output", f"{batch.id}_output.jsonl")
        assert described.bytes == len((await server.client.files.content(described.id)).content)


@pytest.mark.parametrize("endpoint", get_args(Endpoint))
async def test_each_endpoint_takes_batches(endpoint: str, tmp_path: Path) -> None:
    fields = {CHATS: line(0)["body"], "/v1/completions": {"prompt": "x"}}
    body = {"model": NAME, **fields.get(endpoint, {"input": "x"})}
    async with Server(tmp_path, FakeGenerator()).running() as server:
        asked = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
        done = await server.ended((await server.submit([asked], endpoint)).id)
        (answer,) = await server.answers(done.output_file_id or done.error_file_id)
        assert answer["response"]["status_code"] == (400 if "embeddings" in endpoint else 200)


WRONG = [
    ("{", "invalid_json_line", None),
    ("[]", "invalid_json_line", None),
    ({**line(1), "custom_id": None}, "missing_required_parameter", "custom_id"),
    (line(0), "duplicate_custom_id", "custom_id"),
    ({**line(1), "method": "GET"}, "invalid_method", "method"),
    ({**line(1), "url": "/v1/completions"}, "invalid_url", "url"),
    ({**line(1), "body": "x"}, "invalid_request", "body"),
    (line(1, stream=True), "invalid_request", "body"),
]


async def test_what_is_wrong_is_said_before_anything_runs(tmp_path: Path) -> None:
    async with Server(tmp_path, FakeGenerator()).running() as server:
        failed = await server.ended((await server.submit([line(0), *(wrong for wrong, _, _ in WRONG)])).id)
        assert failed.status == "failed"
        assert failed.errors is not None
        assert failed.errors.data is not None
        found = [(error.code, error.param, error.line) for error in failed.errors.data]
        assert found == [(code, param, number) for number, (_, code, param) in enumerate(WRONG, 2)]
        empty = await server.ended((await server.submit(["", " "])).id)
        assert empty.errors is not None
        assert [error.code for error in empty.errors.data or ()] == ["empty_file"]
        assert server.generator.requests == []


async def test_a_batch_can_be_cancelled_at_any_ingress(tmp_path: Path) -> None:
    runs, asks = Server(tmp_path, FakeGenerator(pause_s=0.005)), Server(tmp_path, FakeGenerator())
    async with runs.running():
        batch = await asks.submit([line(n) for n in range(400)])
        while not runs.generator.finished:
            await asyncio.sleep(0.005)
        assert (await asks.client.batches.cancel(batch.id)).status == "cancelling"
        ended = await asks.ended(batch.id)
        assert (ended.status, ended.cancelled_at is not None) == ("cancelled", True)
        answered = await asks.answers(ended.output_file_id)
        assert 0 < len(answered) < 400
        with pytest.raises(openai.ConflictError, match="is cancelled already"):
            await asks.client.batches.cancel(batch.id)
    assert len(runs.generator.closed) <= 4


async def test_what_time_leaves_undone_is_listed_as_expired(tmp_path: Path) -> None:
    server = Server(tmp_path, FakeGenerator())
    batch = await server.submit([line(n) for n in range(3)])
    record = await server.batches.get(batch.id, "")
    await server.store.put([stored_batch(record | {"expires_at": record["created_at"] - 1})])
    async with server.running():
        ended = await server.ended(batch.id)
    assert ended.status == "expired"
    errors = await server.answers(ended.error_file_id)
    assert {each["error"]["code"] for each in errors} == {"batch_expired"}
    assert len(errors) == 3


class Busy(FakeGenerator):
    """Refuses each request once, and loses it once."""

    async def generate(self, request: Request, shared: object = None):
        number = len(self.requests)
        if number % 3 < 2:
            self.requests.append(request)
            raise Overloaded("too much", 0.001) if number % 3 else ReplicaLost("gone")
        async for token in super().generate(request):
            yield token


async def test_load_and_losses_are_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.ingress.batches.batch_job.MAX_WAIT_S", 0.01)
    async with Server(tmp_path, Busy()).running() as server:
        ended = await server.ended((await server.submit([line(n) for n in range(30)])).id)
    assert ended.request_counts is not None
    assert (ended.request_counts.completed, ended.request_counts.failed) == (30, 0)


async def test_tenants_see_and_pay_for_their_own(tmp_path: Path) -> None:
    keys = {name: TenantRules(keys=(_secret(name),), slo_classes=("standard",)) for name in ("a", "b")}
    rules = Rules(CLASSES, {"": TenantRules(), **keys})
    async with Server(tmp_path, FakeGenerator(), rules, key="key-a").running() as server:
        batch = await server.submit([line(0)])
        assert (await server.ended(batch.id)).status == "completed"
        (request,) = server.generator.requests
        assert (request.tenant, request.slo.name) == ("a", "standard")
        other = server.client.with_options(api_key="key-b")
        for ask in (
            other.batches.retrieve(batch.id),
            other.batches.cancel(batch.id),
            other.files.retrieve(batch.input_file_id),
            other.files.content(batch.input_file_id),
            other.files.delete(batch.input_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                await ask
        assert (await other.batches.list()).data == []
        assert (await other.files.list()).data == []
        with pytest.raises(openai.BadRequestError, match="there is no file"):
            await other.batches.create(
                input_file_id=batch.input_file_id, endpoint=CHATS, completion_window="24h"
            )
        nobody = await server.http.get("/v1/files")
        assert nobody.status_code == 401


def _secret(name: str) -> Any:

    return SecretStr(f"key-{name}")


async def test_files_are_listed_read_and_deleted(tmp_path: Path) -> None:
    server = Server(tmp_path, FakeGenerator())
    ids = [
        (await server.client.files.create(file=(f"{n}.jsonl", b"x" * n), purpose="batch")).id
        for n in range(5)
    ]
    assert {file.id async for file in server.client.files.list(limit=2)} == set(ids)
    assert (await server.client.files.content(ids[3])).content == b"xxx"
    batch = await server.client.batches.create(input_file_id=ids[0], endpoint=CHATS, completion_window="24h")
    with pytest.raises(openai.ConflictError, match="reads"):
        await server.client.files.delete(ids[0])
    assert (await server.client.files.delete(ids[1])).deleted
    with pytest.raises(openai.NotFoundError):
        await server.client.files.retrieve(ids[1])
    assert [each.id async for each in server.client.batches.list(limit=1)] == [batch.id]


async def test_bad_uploads_and_batches_are_refused(tmp_path: Path) -> None:
    server = Server(tmp_path, FakeGenerator())
    with pytest.raises(openai.APIStatusError, match="delete some") as refused:
        await server.client.files.create(file=b"x" * (2 << 20), purpose="batch")
    assert refused.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="purpose must be 'batch'"):
        await server.client.files.create(file=b"x", purpose="vision")
    with pytest.raises(openai.BadRequestError, match="files stay until"):
        await server.client.files.create(
            file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
    assert (await server.http.post("/v1/files", json={})).status_code == 415
    assert (await server.http.post("/v1/files", content=_pieces())).status_code == 411
    form = {"content-type": "multipart/form-data; boundary=b"}
    assert (await server.http.post("/v1/files", content=b"--b\r\nnonsense", headers=form)).status_code == 400
    file = await server.client.files.create(file=b"x", purpose="batch")
    create = server.client.batches.create
    for field, value in (
        ("endpoint", "/v1/models"),
        ("completion_window", "1h"),
        ("input_file_id", "../../etc"),
    ):
        wanted: dict[str, Any] = {
            "endpoint": CHATS,
            "completion_window": "24h",
            "input_file_id": file.id,
            field: value,
        }
        with pytest.raises(openai.BadRequestError) as error:
            await create(**wanted)
        assert error.value.param == field
    for query in ("limit=0", "limit=x", "order=up", "after=none"):
        assert (await server.http.get(f"/v1/files?{query}")).status_code == 400
    assert (await server.client.batches.list()).data == []
    assert [each.id for each in (await server.client.files.list()).data] == [file.id]


async def _pieces() -> AsyncIterator[bytes]:
    yield b"x"


async def test_without_a_folder_it_is_said_what_is_missing() -> None:
    app = create_app(FakeGenerator(), ByteTokenizer(), SETTINGS, Access(OPEN), make_observers(NAME))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as http:
        for path in ("/v1/files", "/v1/batches/batch_1"):
            answer = await http.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "batches_off")
            assert "serve.store" in answer.json()["error"]["message"]


async def test_slow_batches_of_one_tenant_do_not_keep_anothers_waiting(tmp_path: Path) -> None:
    tenants = {name: TenantRules((SecretStr(name),)) for name in ("slow", "quick")}

    class Generator(FakeGenerator):
        num_open, most_open = Counter[str](), Counter[str]()

        async def generate(self, request: Request, shared: object = None):
            self.num_open[request.tenant] += 1
            self.most_open[request.tenant] = max(
                self.most_open[request.tenant], self.num_open[request.tenant]
            )
            try:
                if request.tenant == "slow":
                    await asyncio.Event().wait()
                async for token in super().generate(request, shared):
                    yield token
            finally:
                self.num_open[request.tenant] -= 1

    generator = Generator("fine")
    rules = Rules(CLASSES, tenants)
    slow, quick = (Server(tmp_path, generator, rules, key=key) for key in ("slow", "quick"))
    async with slow.running():
        held = [await slow.submit([line(n) for n in range(10)]) for _ in range(6)]
        async with asyncio.timeout(PATIENCE_S):
            while generator.num_open["slow"] < 4:
                await asyncio.sleep(0.01)
        done = await quick.ended((await quick.submit([line(0), line(1)])).id)
        assert done.status == "completed"
        assert generator.most_open["slow"] == 4, "all batches of a tenant share what it may have open"
        assert (await slow.client.batches.retrieve(held[0].id)).status != "completed"


async def test_a_tenants_batches_take_turns(tmp_path: Path) -> None:
    async with Server(tmp_path, FakeGenerator(pause_s=0.005)).running() as server:
        long = await server.submit([line(n) for n in range(400)])
        short = await server.ended((await server.submit([line(0), line(1)])).id)
        assert short.status == "completed"
        assert (await server.client.batches.retrieve(long.id)).status == "in_progress"
