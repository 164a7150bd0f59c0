"""Limits hold over all ingresses, also while ingresses and schedulers are killed."""

import asyncio

import pytest

from cluster.ingress.tenants.shares import PATIENCE_S
from cluster.ingress.tenants.use_limits import UseLimits
from core.errors import Overloaded, RequestError
from core.limit_book import LEASE_S
from sim.virtual_loop import run_virtual
from tests.cluster.ingress.tenants.limited_cluster import (
    LATENCY_S,
    WARM_S,
    Clients,
    LimitedCluster,
    in_minutes,
    rules_of,
)

SECONDS = 240.0


async def asked_twice_as_much(limits: UseLimits, *, kills: bool) -> list[Clients]:
    """Return what clients of four ingresses got, who ask for twice what each limit allows. With `kills` an ingress and the
    scheduler that leads end at 73 s, and another scheduler, which leads from then on, comes at 98 s."""
    cluster = LimitedCluster(rules_of(limits), num_ingresses=4, num_schedulers=2)
    await asyncio.sleep(WARM_S)
    clients = [Clients(cluster.clock, one.holder("k"), seed) for seed, one in enumerate(cluster.ingresses)]
    for one, ingress in zip(clients, cluster.ingresses, strict=True):
        ingress.spawn(one.ask_often(9.0))
    if kills:
        await asyncio.sleep(70)
        await asyncio.gather(cluster.ingresses[1].kill(), cluster.kill_scheduler(0))
        await asyncio.sleep(25)
        cluster.schedulers.append(cluster.new_scheduler("a"))
    await asyncio.sleep(SECONDS - cluster.clock.now())
    await cluster.close()
    return clients


@pytest.mark.parametrize("kills", [False, True])
@pytest.mark.parametrize("what", ["requests", "tokens"])
def test_in_any_minute_all_ingresses_together_give_what_a_limit_allows(what: str, kills: bool) -> None:
    limits = UseLimits(requests_per_min=1000) if what == "requests" else UseLimits(tokens_per_min=60_000)
    clients = run_virtual(asked_twice_as_much(limits, kills=kills))
    uses = [use for one in clients for use in (one.requests if what == "requests" else one.tokens)]
    limit = limits.requests_per_min or limits.tokens_per_min
    minutes = in_minutes(uses, WARM_S, SECONDS)
    assert max(minutes) <= (limit if what == "requests" else 1.05 * limit), "outputs may differ from the mean"
    assert sum(n for _, n in uses) >= 0.95 * limit * (SECONDS - WARM_S) / 60
    if what == "requests" and not kills:
        assert min(minutes) >= 0.95 * limit
    assert all(one.num_refused for one in clients)
    if not kills:
        assert max(one.longest_wait_s for one in clients) <= 2 * 2 * LATENCY_S + 1e-6, (
            "one answer for each count"
        )


def test_sequences_of_all_ingresses_are_counted_together() -> None:
    async def most_at_once() -> tuple[int, int, int]:
        cluster = LimitedCluster(rules_of(UseLimits(concurrent=20)), num_ingresses=4, num_schedulers=2)
        await asyncio.sleep(WARM_S)
        clients = [
            Clients(cluster.clock, one.holder("k"), seed) for seed, one in enumerate(cluster.ingresses)
        ]
        for one, ingress in zip(clients, cluster.ingresses, strict=True):
            ingress.spawn(one.ask_often(20.0))

        async def counted(seconds: float) -> list[int]:
            found: list[int] = []
            until = cluster.clock.now() + seconds
            while cluster.clock.now() < until:
                await asyncio.sleep(0.01)
                found.append(sum(one.num_running for one in clients))
            return found

        before = await counted(20)
        await asyncio.gather(cluster.ingresses[1].kill(), cluster.kill_scheduler(0))
        meanwhile = await counted(LEASE_S + 2)
        after = await counted(20)
        await cluster.close()
        return max(before), max(meanwhile), max(after)

    assert run_virtual(most_at_once()) == (20, 20, 20)


def test_a_request_goes_on_while_no_scheduler_answers_as_before_and_no_further() -> None:
    async def let_in() -> tuple[int, str, float]:
        cluster = LimitedCluster(rules_of(UseLimits(requests_per_min=100)), num_ingresses=2, num_schedulers=1)
        await asyncio.sleep(WARM_S)
        accounts = [one.holder("k").account for one in cluster.ingresses]
        for _ in range(40):
            await accounts[0].count_request()
        await asyncio.sleep(1)
        await cluster.kill_scheduler(0)
        await asyncio.sleep(58)
        num_let_in, why = 0, ""
        while not why:
            try:
                await accounts[0].count_request()
                num_let_in += 1
            except Overloaded as refused:
                why = str(refused)
        began_at = cluster.clock.now()
        with pytest.raises(Overloaded):
            await accounts[1].count_request()
        waited_s = cluster.clock.now() - began_at
        await cluster.close()
        return num_let_in, why, waited_s

    num_let_in, why, waited_s = run_virtual(let_in())
    assert num_let_in == 40
    assert "no scheduler says how much is left" in why
    assert waited_s == pytest.approx(PATIENCE_S, abs=1.5), "it had none of the limit before"


def test_keys_tenants_and_models_have_limits_of_their_own_and_refusals_say_whose() -> None:
    async def refusals() -> list[str]:
        rules = rules_of(
            UseLimits(requests_per_min=10),
            per_key=UseLimits(requests_per_min=5),
            per_model={"m": UseLimits(tokens_per_min=500)},
        )
        cluster = LimitedCluster(rules, num_ingresses=1, num_schedulers=1)
        await asyncio.sleep(WARM_S)
        account, found = cluster.ingresses[0].holder("k").account, list[str]()
        for num_prompt, times in ((100, 3), (450, 1), (501, 1)):
            try:
                for _ in range(times):
                    async with account.running(1, num_prompt, 0, "m"):
                        pass
            except (Overloaded, RequestError) as error:
                found.append(str(error))
        try:
            while True:
                await account.count_request()
        except Overloaded as error:
            found.append(str(error))
        async with account.running(1, 10_000, 0, "another"):
            pass
        await cluster.close()
        return found

    busy, never, key = run_virtual(refusals())
    whose = "tenant 'acme' with model 'm' may have 500 tokens per minute, at all ingresses together"
    assert busy == f"rate limit: {whose}; come again in 61 s"
    assert never == f"this request alone exceeds the rate limit: {whose}"
    assert key.startswith("rate limit: key 'key_")
    assert "may have 5 requests per minute" in key
