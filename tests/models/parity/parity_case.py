"""One class of transformers through a prefill and a decode instance: its tokens beside those of `generate`."""

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import engine.ranks.child_ranks
from cluster.local import LocalCluster
from core.config.cluster_config import load
from core.errors import ConfigError
from core.types import Request, SamplingParams
from engine.sizing.model_dims import check_mesh
from models.families.table import read_spec
from parallel.mesh import Mesh
from tests.models.parity.tiny_checkpoints import VOCAB, make_tiny
from tests.models.served import greedy
from tests.parallel.forked_ranks import start_forked

LENGTH, TIE = 64, 1e-3
_SAMPLING = SamplingParams(temperature=0.0, max_tokens=LENGTH)
_KEYS: dict[str, Any] = {
    "engine.block_size": 4,
    "engine.num_blocks": 800,
    "engine.max_batch_tokens": 24,
    "schedule.local_threshold_tokens": 0,
}
Result = Literal["same", "differs", "refused", "fails", "untried"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    architecture: str
    served_by: str
    """baton, transformers, or nothing."""
    result: Result
    tp: int
    """The most tensor-parallel ranks that were tried: two, or one where ranks cannot share the layers."""
    reason: str
    """Why it is not the same, or why one rank decodes."""


def tried(architecture: str, tp: int = 2) -> Row:
    """Try a class of transformers. `tp`: ranks of the decode instance, where they can share the layers."""
    engine.ranks.child_ranks.start_children = start_forked
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        try:
            reference = make_tiny(folder, architecture)
            wanted = [list(greedy(reference, prompt, LENGTH)) for prompt in prompts()]
        except Exception as error:
            return _row(architecture, "", "untried", 1, _said(error))
        return _beside(architecture, folder, reference, wanted, tp)


def _beside(
    architecture: str, folder: Path, reference: Any, wanted: Sequence[Sequence[int]], most: int
) -> Row:
    by, tp, why_one = "", 1, ""
    try:
        spec = read_spec(folder)
        by = spec.implementation
        try:
            check_mesh(spec, Mesh(tp=most), "decode")
            found, tp = asyncio.run(_served(folder, {"decode.tp": most})), most
        except ConfigError as error:
            why_one = _said(error)
            found = asyncio.run(_served(folder, {}))
    except ConfigError as error:
        return _row(architecture, "", "refused", 1, _said(error))
    except Exception as error:
        return _row(architecture, by, "fails", tp, _said(error))
    for prompt, own, theirs in zip(prompts(), found, wanted, strict=True):
        if len(own) != LENGTH or (list(own) != list(theirs) and not _ties(reference, prompt, own)):
            same = next((at for at, (a, b) in enumerate(zip(own, theirs, strict=False)) if a != b), len(own))
            return _row(architecture, by, "differs", tp, f"after {same} tokens")
    return _row(architecture, by, "same", tp, why_one)


def prompts() -> list[list[int]]:
    """The second one begins as the first does."""
    rng = random.Random(0)
    first = [rng.randrange(2, VOCAB) for _ in range(37)]
    return [first, [*first[:23], *(rng.randrange(2, VOCAB) for _ in range(8))]]


async def _served(folder: Path, keys: dict[str, Any]) -> list[list[int]]:
    """Prompts go from prefill to decode in chunks."""
    async with LocalCluster.running(load(None, {}, {"model.path": str(folder), **_KEYS, **keys})) as cluster:
        frontend = cluster.frontend

        async def answer(prompt: Sequence[int]) -> list[int]:
            request = Request(
                id=frontend.new_request_id(), prompt=tuple(prompt), sampling=_SAMPLING, reply_to=frontend.address
            )  # fmt: skip
            return [token.token async for token in frontend.generate(request)]

        found = await asyncio.gather(*map(answer, prompts()))
        for instance in cluster.instances:
            instance.check_integrity()
    return list(found)


@torch.inference_mode()
def _ties(reference: Any, prompt: Sequence[int], said: Sequence[int]) -> bool:
    """Return whether each token is the likeliest after those before it, but for rounding."""
    rows = reference(torch.tensor([[*prompt, *said[:-1]]])).logits[0, len(prompt) - 1 :]
    off = rows.max(-1).values - rows.gather(1, torch.tensor(said)[:, None])[:, 0]
    return bool((off < TIE * rows.std()).all())


def _row(architecture: str, by: str, result: Result, tp: int, reason: str) -> Row:
    return Row(architecture=architecture, served_by=by, result=result, tp=tp, reason=reason)


def _said(error: BaseException) -> str:
    """Return an error in one line, without the folder that it happened in."""
    text = " ".join(str(error).split())
    folder = tempfile.gettempdir()
    words = ["the folder" if word.startswith(folder) else word for word in text.split(" ")]
    name = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    return name + " ".join(words)[:240]


def timed(architecture: str, tp: int) -> tuple[Row, float]:
    start = time.monotonic()
    return tried(architecture, tp), time.monotonic() - start
