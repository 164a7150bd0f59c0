"""Sessions whose KV only lower tiers have: it is in the pool again when the next turn comes."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from core.types import CacheHints, Request, SamplingParams
from tests.chaos.witness import undisturbed
from tests.engine.tiers.test_restoring import Served, config, prompts
from tests.patience import PATIENCE_S, until

FIRST, *OTHERS = prompts(13)
ANSWER = undisturbed(FIRST, 3)


async def take_turn(served: Served, prompt: tuple[int, ...], hints: CacheHints) -> None:
    """Ask as `Served.ask` does, for a session."""
    served.hints = hints
    try:
        await served.ask(prompt)
    finally:
        served.hints = CacheHints()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("host", "disk"), [(500, 0), (0, 500)], ids=["host", "disk"])
async def test_a_session_is_back_before_its_turn(tmp_path: Path, host: int, disk: int, groups: int) -> None:
    served = Served(config(tmp_path, host, disk), num_groups=groups)
    await take_turn(served, FIRST, CacheHints(session="s", prefetch_s=1e9))
    for other in OTHERS:
        await served.ask(other)
    follows = Request(
        id="next", prompt=(*FIRST, *ANSWER, 5, 6), sampling=SamplingParams(), reply_to="f", salt=""
    )
    assert served.scheduler.prefixes.cached_prefix(follows).num_kept == 0
    assert served.engine.hint_session("", "s", release=False)
    await until(lambda: served.engine.work_counts().sessions.prefetched == 1)
    await served.restoring.settled()
    read = served.store.counts
    assert read.host_hits + read.disk_hits >= 10
    assert await served.ask(follows.prompt) <= 8
    assert served.store.counts == replace(read, saved=served.store.counts.saved), "the turn has read nothing"
    assert not served.engine.hint_session("", "nobody's", release=False)
    await served.close()


@pytest.mark.parametrize("aborted", [False, True])
async def test_a_turn_that_comes_while_it_is_read_back_waits_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aborted: bool
) -> None:
    served = Served(config(tmp_path, 500))
    await take_turn(served, FIRST, CacheHints(session="s", prefetch_s=1e9))
    for other in OTHERS:
        await served.ask(other)
    may, fetch = asyncio.Event(), served.store.fetch
    num_read: list[int] = []

    async def slow(digests: Sequence[bytes]) -> list[bytes]:
        num_read.append(len(digests))
        await may.wait()
        return await fetch(digests)

    monkeypatch.setattr(served.store, "fetch", slow)
    assert served.engine.hint_session("", "s", release=False)
    await until(lambda: num_read != [])
    before, name = served.num_computed, served.add((*FIRST, *ANSWER, 5, 6))
    if aborted:
        served.engine.abort(f"{name}#0")
    may.set()
    if aborted:
        await served.restoring.settled()
        assert served.num_computed == before
    else:
        await asyncio.wait_for(served.ends[name].wait(), PATIENCE_S)
        assert served.num_computed - before <= 8 + 3
    assert num_read == [10], "it is read once"
    await served.close()


async def test_an_engine_that_does_nothing_else_wakes_in_time(tmp_path: Path) -> None:
    served = Served(config(tmp_path, 500))
    await take_turn(served, FIRST, CacheHints(session="s", prefetch_s=0.3))
    for other in OTHERS:
        await served.ask(other)
    await until(lambda: served.engine.work_counts().sessions.prefetched == 1)
    await served.close()
