"""Bodies that come in at the same time have so much memory together, and one tenant's half of it."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import httpx
import pytest
from pydantic import SecretStr

from cluster.ingress.http import request_body
from cluster.ingress.http.body_room import BodyRoom
from cluster.ingress.tenants.access import Rules, TenantRules
from core.errors import Overloaded
from tests.cluster.ingress.api.fakes import FakeGenerator
from tests.cluster.ingress.api.harness import CLASSES, COMPLETIONS, OK, SETTINGS, Api


def test_one_tenant_has_half_and_all_together_the_whole() -> None:
    room = BodyRoom(100)
    with (
        room.coming("a") as first,
        room.coming("a") as second,
        room.coming("b") as third,
        room.coming("") as last,
    ):
        first.add(40)
        with pytest.raises(Overloaded):
            second.add(11)
        second.add(10)
        third.add(45)
        with pytest.raises(Overloaded):
            last.add(6)
        last.add(5)
    with room.coming("a") as again:
        again.add(50)


async def test_who_sends_too_much_at_once_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "ROOM", BodyRoom(400_000))
    tenants = {name: TenantRules((SecretStr(name),)) for name in ("acme", "other")}
    made = Api(FakeGenerator(), SETTINGS, Rules(CLASSES, {"": TenantRules(), **tenants}))
    go_on = asyncio.Event()

    async def slowly() -> AsyncGenerator[bytes]:
        yield b'{"prompt": "' + b"x" * 150_000
        await go_on.wait()

    def headers(tenant: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {tenant}", "content-type": "application/json"}

    holding = asyncio.create_task(made.http.post(COMPLETIONS, content=slowly(), headers=headers("acme")))
    await asyncio.sleep(0.05)
    body = {**OK, "prompt": "x" * 100_000}
    refused = await made.post(COMPLETIONS, body, **headers("acme"))
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert (await made.post(COMPLETIONS, OK, **headers("acme"))).status_code == 200
    assert "context" in (await made.post(COMPLETIONS, body, **headers("other"))).text
    go_on.set()
    with contextlib.suppress(httpx.HTTPError):
        await holding
    assert "context" in (await made.post(COMPLETIONS, body, **headers("acme"))).text
