"""Every family on every mesh behind the real server: greedy answers over HTTP are transformers' own.

Each pair is a whole server: the HTTP app, frontend, scheduler, a prefill and a decode instance on different meshes, whose ranks are
processes, and the hand-over between them. Over a family's pairs each of its meshes occurs once; families are paired by different
rounds of a round-robin tournament, so that over all families nearly every two meshes meet. Pairs with stages of recurrent layers
come beside that. Models have three layers, or five, and heads that divide unevenly (`families.py`). `python -m
benchmarks.parallel.served_grid` tries them all."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from cluster.ingress.api_factory import build_app
from cluster.ingress.http.http_server import HttpServer
from cluster.ingress.model_card import read_model_card
from cluster.ingress.telemetry.observers import make_observers
from cluster.ingress.tenants.live_rules import LiveRules
from cluster.local import LocalCluster
from core.config.cluster_config import ClusterConfig, load
from models.text.tokenizer import load_tokenizer
from parallel.mesh import Mesh
from tests.models.checkpoints import DENSE, HYBRID, SPARSE, UNSTAGED
from tests.models.served import greedy, make_served_as, some_prompts
from tests.parallel.families import awkward

MESHES = [Mesh(), Mesh(tp=2), Mesh(tp=4), Mesh(pp=2), Mesh(pp=3), Mesh(tp=2, pp=2)]
HYBRID_MESHES = [Mesh(), Mesh(tp=2), Mesh(ep=2), Mesh(ep=4), Mesh(tp=2, ep=2), Mesh(dp=2, ep=2)]
"""Recurrent layers are not cut finer than KV heads."""
HYBRID_STAGES = [
    (Mesh(pp=2), Mesh()),
    (Mesh(tp=2), Mesh(pp=2)),
    (Mesh(pp=2), Mesh(tp=2)),
    (Mesh(tp=2, pp=2), Mesh(ep=2)),
    (Mesh(pp=2, dp=2), Mesh(tp=2, pp=2)),
]
"""Prefill and decode between which states pass from stages to other stages, to heads, or to one rank, and back."""
UNSTAGED_MESHES = [Mesh(tp=2), Mesh()]
EXPERT_MESHES = [*MESHES, Mesh(ep=2), Mesh(ep=4), Mesh(tp=2, ep=2), Mesh(dp=2, ep=2)]
NUM_PROMPTS, LENGTH = 4, 8


@dataclass(frozen=True, slots=True)
class Pair:
    family: str
    prefill: Mesh
    decode: Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    family: str
    prefill: str
    decode: str
    equal: int
    """Answers that are transformers' own, of `asked`."""
    asked: int
    handed_over: int
    """Prompts whose KV came from the prefill instance."""
    seconds: float


def pairs() -> Iterator[Pair]:
    """Each family on each of its meshes, as prefill or decode; with recurrent layers on stages, too."""
    grids = [(sorted(DENSE), MESHES), (sorted(SPARSE), EXPERT_MESHES), (sorted(HYBRID), HYBRID_MESHES)]
    grids += [(sorted(UNSTAGED), UNSTAGED_MESHES)]
    for families, meshes in grids:
        for number, family in enumerate(families):
            for place, (one, other) in enumerate(tournament(meshes, number)):
                prefill, decode = (one, other) if (place + number) % 2 else (other, one)
                yield Pair(family, prefill, decode)
    for family in sorted(HYBRID):
        for prefill, decode in HYBRID_STAGES:
            yield Pair(family, prefill, decode)


def tournament(meshes: Sequence[Mesh], number: int) -> list[tuple[Mesh, Mesh]]:
    """The `number`-th round in which each of an even number of meshes meets another one: one stays, the others go round."""
    first, *others = meshes
    turn = number % len(others)
    ring = [first, *others[turn:], *others[:turn]]
    return list(zip(ring[: len(ring) // 2], reversed(ring), strict=False))


def settings(folder: Path, pair: Pair, **keys: Any) -> ClusterConfig:
    meshes = {
        f"{role}.{axis}": getattr(mesh, axis)
        for role, mesh in (("prefill", pair.prefill), ("decode", pair.decode))
        for axis in ("tp", "pp", "dp", "ep")
    }
    values = {
        "model.path": str(folder),
        "engine.block_size": 4,
        "engine.num_blocks": 2400 if pair.family in HYBRID else 240,
        "engine.max_batch_tokens": 48,
        "schedule.local_threshold_tokens": 0,
    }
    return load(None, {}, values | meshes | keys)


@contextlib.asynccontextmanager
async def http_server(config: ClusterConfig) -> AsyncIterator[tuple[LocalCluster, openai.AsyncOpenAI]]:
    card = read_model_card(config)
    observers = make_observers(card.name)
    async with LocalCluster.running(config, observers.observe) as cluster:
        app = build_app(cluster.frontend, config, card, LiveRules(config).access, observers)
        server = HttpServer(app, "127.0.0.1", [0], shared=False)
        server.start()
        port = server.port
        try:
            url = f"http://127.0.0.1:{port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
                yield cluster, client
        finally:
            await server.stop()


async def ask(client: openai.AsyncOpenAI, model: str, prompt: list[int]) -> str:
    answer = await client.completions.create(model=model, prompt=prompt, max_tokens=LENGTH, temperature=0)
    return answer.choices[0].text


async def serve(pair: Pair, folder: Path, prompts: list[list[int]], want: list[str]) -> Found:
    started = time.perf_counter()
    async with http_server(settings(folder, pair)) as (cluster, client):
        model = (await client.models.list()).data[0].id
        found = await asyncio.gather(*(ask(client, model, prompt) for prompt in prompts))
        for instance in cluster.instances:
            instance.check_integrity()
        grants = [instance.work_counts().grants for instance in cluster.instances]
    equal = sum(ours == theirs for ours, theirs in zip(found, want, strict=True))
    return Found(
        family=pair.family,
        prefill=str(pair.prefill),
        decode=str(pair.decode),
        equal=equal,
        asked=len(found),
        handed_over=sum(grants),
        seconds=round(time.perf_counter() - started, 1),
    )


def prepare(family: str, folder: Path) -> tuple[list[list[int]], list[str]]:
    """A checkpoint; prompts and what transformers says to them."""
    reference, prompts = make_served_as(folder, awkward(family)), some_prompts(11, NUM_PROMPTS, 24)
    decode = load_tokenizer(folder).decode
    return prompts, [decode(list(greedy(reference, prompt, LENGTH))) for prompt in prompts]


def is_right(found: Found) -> bool:
    return found.equal == found.asked and 2 * found.handed_over >= NUM_PROMPTS
