"""Images by http(s) URL: which are fetched, what becomes of them, and that no client reaches what the operator has not named."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.ingress.images.image_fetching import ImageFetcher
from core.config.image_config import ImageConfig
from tests.authority import Authority
from tests.cluster.ingress.api.fakes import NAME
from tests.cluster.ingress.api.harness import CHATS, Api
from tests.cluster.ingress.images.test_images import BODY, LIMITS, PNG, SEEN, asked, seeing, url
from tests.models.seeing_checkpoints import said

OK = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(PNG), PNG)


class Host:
    """A web server that gives each request the same answer; None: no answer at all."""

    def __init__(self, answer: bytes | None) -> None:
        self._answer = answer
        self.port = 0
        self.heads: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        if self._answer is None:
            await reader.read()
        else:
            writer.write(self._answer)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def host(answer: bytes | None = OK, tls: ssl.SSLContext | None = None) -> AsyncIterator[Host]:
    made = Host(answer)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=tls)
    made.port = server.sockets[0].getsockname()[1]
    async with server:
        yield made


async def at_home(name: str, port: int) -> list[str]:
    """Resolve every name to this machine."""
    return ["127.0.0.1"]


def fetching(*hosts: str, resolve: Any = at_home, **limits: Any) -> Api:
    taken = LIMITS.model_copy(update={"url_hosts": hosts, "url_timeout_s": 600.0, **limits})
    return seeing(taken, image_fetcher=ImageFetcher(taken, resolve))


async def refusal(api: Api, *parts: Any) -> str:
    answer = await api.post(CHATS, asked(list(parts)))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages"), answer.text
    assert not api.generator.requests
    return answer.json()["error"]["message"]


async def test_an_image_by_url_is_the_image_itself() -> None:
    async with host() as web:
        api = fetching(f"images.test:{web.port}")
        there = url(f"http://Images.test:{web.port}/a.png?size=2#x")
        await api.openai.chat.completions.create(**asked([said("a"), there, said("b")]))
    (request,) = api.generator.requests
    assert (bytes(request.prompt), request.images) == (BODY, SEEN)
    (head,) = web.heads
    assert head.startswith("GET /a.png?size=2 HTTP/1.1\r\n")
    assert f"\r\nHost: images.test:{web.port}\r\n" in head


async def test_every_route_takes_them() -> None:
    async with host() as web:
        api = fetching(f"images.test:{web.port}")
        there = f"http://images.test:{web.port}/a.png"
        chat = asked([said("a"), url(there), said("b")])
        image = {"type": "image", "source": {"type": "url", "url": there}}
        claude = asked([said("a"), image, said("b")])
        parts = [
            {"type": "input_text", "text": "a"},
            {"type": "input_image", "image_url": there},
            {"type": "input_text", "text": "b"},
        ]
        response = {"model": NAME, "input": [{"role": "user", "content": parts}]}
        uncounted = {name: value for name, value in claude.items() if name != "max_tokens"}
        for path, body, counted in (
            (CHATS, chat, ("usage", "prompt_tokens")),
            ("/v1/messages", claude, ("usage", "input_tokens")),
            ("/v1/messages/count_tokens", uncounted, ("input_tokens",)),
            ("/v1/responses", response, ("usage", "input_tokens")),
            ("/v1/responses/input_tokens", response, ("input_tokens",)),
            ("/tokenize", {"messages": chat["messages"]}, ("count",)),
        ):
            answer = await api.post(path, body)
            assert answer.status_code == 200, (path, answer.text)
            found = answer.json()
            for name in counted:
                found = found[name]
            assert found == len(BODY), path
    assert len(web.heads) == 6


async def test_https_shows_that_the_host_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path, "ours")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.path))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*authority.member("images.test")[:2])
    async with host(tls=tls) as web:
        api = fetching(f"images.test:{web.port}", f"other.test:{web.port}")
        why = await refusal(api, url(f"https://other.test:{web.port}/"))
        assert "cannot be reached: [SSL: CERTIFICATE_VERIFY_FAILED]" in why
        there = url(f"https://images.test:{web.port}/a.png")
        assert (await api.post(CHATS, asked([said("a"), there, said("b")]))).status_code == 200
    assert api.generator.requests[0].images == SEEN


async def test_one_that_stands_twice_is_fetched_once() -> None:
    async with host() as web:
        api = fetching(f"images.test:{web.port}")
        there = url(f"http://images.test:{web.port}/a.png")
        assert (await api.post(CHATS, asked([there, there]))).status_code == 200
    assert len(web.heads) == 1
    assert len(api.generator.requests[0].images) == 2


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\n\r\n", "leads to another one"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "answered with the status 404"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000, "more than this server's limit of 4096 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "no PNG, JPEG, WEBP or GIF"),
        (b"SSH-2.0-OpenSSH\r\n", "did not answer"),
        (None, "did not come within 0.05 s"),
    ],
)
async def test_what_a_host_may_answer(answer: bytes | None, says: str) -> None:
    async with host(answer) as web:
        api = fetching(f"images.test:{web.port}", url_timeout_s=0.05 if answer is None else 600.0)
        message = await refusal(api, said("a"), url(f"http://images.test:{web.port}/"))
    assert message.startswith("messages[0].content[1].image_url.url: ")
    assert says in message


@pytest.mark.parametrize(
    "there",
    [
        "http://other.test/",
        "http://images.test:{port}1/",
        "http://images.test/",
        "https://images.test.other.test/",
        "http://images.test@other.test/",
        "http://user:key@images.test:{port}/",
        "http://127.0.0.1:{port}/",
        "http://[::1]:{port}/",
        "http:///a.png",
        "http://images.test:99999/",
        "file:///etc/passwd",
        "ftp://images.test:{port}/",
    ],
)
async def test_nothing_else_is_asked(there: str) -> None:
    async with host() as web:
        api = fetching(f"images.test:{web.port}")
        await refusal(api, url(there.format(port=web.port)))
    assert not web.heads


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "::1", "::ffff:169.254.169.254", "::7f00:1", "64:ff9b:1::1", "fec0::1"],
)
async def test_any_host_means_any_public_one(address: str) -> None:
    async def inside(name: str, port: int) -> list[str]:
        return ["1.1.1.1", address]

    api = fetching("*", resolve=inside)
    assert "'images.test' has no public address" in await refusal(api, url("https://images.test/"))
    assert "from 'images.test:8080'" in await refusal(api, url("https://images.test:8080/"))


async def test_nobody_learns_whether_a_name_of_the_inside_exists() -> None:
    async def nowhere(name: str, port: int) -> list[str]:
        raise OSError("no such name")

    api = fetching("*", resolve=nowhere)
    assert "'images.test' has no public address" in await refusal(api, url("https://images.test/"))


async def test_too_many_are_not_fetched() -> None:
    async with host() as web:
        api = fetching(f"images.test:{web.port}")
        there = url(f"http://images.test:{web.port}/a.png")
        assert "limit of 2" in await refusal(api, *[there] * 3)
    assert not web.heads


def test_nothing_is_fetched_unless_hosts_are_named() -> None:
    assert ImageConfig().url_hosts == ()
