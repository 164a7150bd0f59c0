"""HAProxy and nginx with the example files, before two ingresses that are real processes."""

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.deploy.balancers import BALANCERS, Ingress, balancer, missing
from tests.deploy.streams import Load, Receipts, burst

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.turns(2)]
PAUSE_S, NOTICE_S = 0.1, 3.0
_FORGIVEN_S = 2.5
"""By then nginx (fail_timeout) and HAProxy ask an ingress again that a former test has taken away."""


@pytest.fixture(scope="module")
def ingresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Ingress]]:
    folder = tmp_path_factory.mktemp("ingresses")
    both = [Ingress(PAUSE_S, NOTICE_S, folder / f"{i}.log") for i in range(2)]
    yield both
    for ingress in both:
        ingress.end()


@pytest.fixture(scope="module", params=list(BALANCERS))
def url(
    request: pytest.FixtureRequest, ingresses: list[Ingress], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    if reason := missing(request.param):
        pytest.skip(reason)
    for ingress in ingresses:
        ingress.wait_ready()
    with balancer(
        request.param, [ingress.port for ingress in ingresses], tmp_path_factory.mktemp("lb")
    ) as url:
        yield url


async def test_64_streams_arrive_token_by_token(url: str) -> None:
    async with Receipts.listening() as receipts:
        streams = await burst(url, 64, 20, receipts)
    assert Counter(s.outcome for s in streams) == {"ok": 64}


async def test_nobody_notices_a_drained_ingress(url: str, ingresses: list[Ingress]) -> None:
    drained = ingresses[0]
    async with Load(url, 16, 8) as load:
        drained.process.terminate()
        assert await asyncio.to_thread(drained.process.wait, 40) == 0
        await load.more(16)
    streams = load.streams
    drained.start()
    await asyncio.to_thread(drained.wait_ready)
    assert Counter(s.outcome for s in streams) == {"ok": len(streams)}, [
        (s.status, s.error) for s in streams if s.outcome != "ok"
    ]


async def test_a_killed_ingress_cuts_its_own_streams_visibly_and_nobody_elses(
    url: str, ingresses: list[Ingress]
) -> None:
    killed = ingresses[1]
    await asyncio.sleep(_FORGIVEN_S)
    async with Load(url, 16, 8) as load:
        killed.end()
        num_ended = len(load.streams)
        await load.more(40)
    streams = load.streams
    killed.start()
    await asyncio.to_thread(killed.wait_ready)
    outcomes = Counter(s.outcome for s in streams)
    assert outcomes["silent"] == 0
    assert 0 < outcomes["cut"] <= 16
    assert all(s.retriable for s in streams if s.outcome == "refused"), outcomes
    late = streams[num_ended + 16 :]
    assert not [s for s in late if s.outcome not in ("ok", "refused")]
    assert sum(s.outcome == "ok" for s in late) > 0.9 * len(late)
