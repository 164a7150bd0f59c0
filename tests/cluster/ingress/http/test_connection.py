"""TLS and mutual TLS, over real sockets."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from cluster.ingress.http.http_server import HttpServer
from cluster.ingress.http.ingress_tls import follow_certificate, ingress_tls
from core.config.cluster_config import ServeConfig
from core.errors import ConfigError
from tests.authority import Authority
from tests.cluster.ingress.api.fakes import FakeGenerator
from tests.cluster.ingress.api.harness import Api
from tests.patience import PATIENCE_S


@contextlib.asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    server = HttpServer(Api(FakeGenerator()).app, "127.0.0.1", [0], shared=False, tls=tls)
    server.start()
    try:
        yield server.port
    finally:
        await server.stop()


async def test_https_with_and_without_client_certificates(tmp_path: Path) -> None:
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    cert, key, _ = ours.member("ingress")
    trusting = ssl.create_default_context(cafile=str(ours.path))
    trusting.check_hostname = False

    async def get(port: int, scheme: str = "https", member: tuple[str, str, str] | None = None) -> int:
        context = ssl.create_default_context(cafile=str(ours.path))
        context.check_hostname = False
        if member is not None:
            context.load_cert_chain(member[0], member[1])
        async with httpx.AsyncClient(verify=context) as client:
            return (await client.get(f"{scheme}://127.0.0.1:{port}/health")).status_code

    async with serving(ingress_tls(ServeConfig(tls_cert=cert, tls_key=key))) as port:
        assert await get(port) == 200
        with pytest.raises(httpx.TransportError):
            await get(port, "http")
        async with httpx.AsyncClient() as stranger:
            with pytest.raises(httpx.ConnectError):
                await stranger.get(f"https://127.0.0.1:{port}/health")
    both = ServeConfig(tls_cert=cert, tls_key=key, tls_client_ca=str(ours.path))
    async with serving(ingress_tls(both)) as port:
        assert await get(port, member=ours.member("client")) == 200
        for member in (None, others.member("intruder")):
            with pytest.raises(httpx.TransportError):
                await get(port, member=member)


async def test_new_connections_see_a_certificate_that_was_renewed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path, "ours")
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"

    def renew(name: str) -> bytes:
        made_cert, made_key, _ = authority.member(name)
        key.write_bytes(Path(made_key).read_bytes())
        cert.write_bytes(Path(made_cert).read_bytes())
        return ssl.PEM_cert_to_DER_cert(cert.read_text())

    async def shown(port: int) -> bytes:
        context = ssl.create_default_context(cafile=str(authority.path))
        context.check_hostname = False
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.close()
        return writer.get_extra_info("ssl_object").getpeercert(binary_form=True)

    config = ServeConfig(tls_cert=str(cert), tls_key=str(key))
    first = renew("first")
    context = ingress_tls(config)
    async with serving(context) as port, asyncio.timeout(PATIENCE_S):
        assert await shown(port) == first
        renewed = renew("before it is followed")
        following = asyncio.create_task(follow_certificate(context, config, period_s=0.01))
        while await shown(port) != renewed:
            await asyncio.sleep(0.01)
        renewed = renew("while it is followed")
        while await shown(port) != renewed:
            await asyncio.sleep(0.01)
        cert.write_text("half a certificate")
        while "the changed certificate is refused" not in caplog.text:
            await asyncio.sleep(0.01)
        assert await shown(port) == renewed
    following.cancel()
    await follow_certificate(None, ServeConfig())


def test_mistakes_are_refused_at_the_start(tmp_path: Path) -> None:
    cert, key, ca = Authority(tmp_path, "ours").member("ingress")
    assert ingress_tls(ServeConfig()) is None
    for config, named in (
        (ServeConfig(tls_cert=cert), "belong together"),
        (ServeConfig(tls_client_ca=ca), "belong together"),
        (ServeConfig(tls_cert=cert, tls_key="/nowhere"), "serve.tls_key: there is no file"),
        (ServeConfig(tls_cert=key, tls_key=cert), "serve.tls_cert"),
    ):
        with pytest.raises(ConfigError, match=named):
            ingress_tls(config)
