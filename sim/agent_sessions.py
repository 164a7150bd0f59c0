"""Agents' sessions in closed loop: each turn comes a gap after the one before it was answered, however long that took.

Gaps are those between the starts of turns in the trace (LMCache's agent trace, JSON lines with `session_id`, `turn`, `t_ms`,
`input_length`, `output_length` and `hash_runs` of 64-token blocks). The load is scaled by superposing copies of all sessions,
with prefixes of their own; sessions begin at random in `start_within_s`. A turn that is refused does not end its session."""

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path

from core.kv import block_hashes, num_blocks_for
from core.types import Request, SamplingParams, Slo
from sim.coarse.simulated_sequence import SimulatedRequest

BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTurn:
    at_s: float
    """Since its session began."""
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    """Equal leading ids mean equal leading text; the last block may be partial."""


Session = tuple[SessionTurn, ...]


def read_sessions(path: Path) -> list[Session]:
    """Return the sessions of a trace, in the order in which it has them."""
    found: dict[str, list[SessionTurn]] = {}
    for line in gzip.decompress(path.read_bytes()).decode().splitlines():
        item = json.loads(line)
        turn = SessionTurn(
            at_s=item["t_ms"] / 1000,
            input_tokens=item["input_length"],
            output_tokens=item["output_length"],
            block_ids=tuple(first + i for first, count in item["hash_runs"] for i in range(count)),
        )
        found.setdefault(item["session_id"], []).append(turn)
    return [tuple(sorted(turns, key=lambda turn: turn.at_s)) for turns in found.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLoad:
    """sim.goodput.Offered."""

    sessions: Sequence[Session]
    start_within_s: float
    block_tokens: int = BLOCK_TOKENS

    @property
    def rate(self) -> float:
        """Turns per second of one copy, by how many sessions begin in a second."""
        return sum(map(len, self.sessions)) / self.start_within_s

    def jobs(self, copies: float, seed: int, slo: Slo | Sequence[Slo]) -> list[SimulatedRequest]:
        """Return all turns: the first ones, by arrival, and then those that follow. A session is of one class."""
        rng, slos = random.Random(seed), [slo] if isinstance(slo, Slo) else slo
        numbers: dict[tuple[str, int], int] = {}
        first: list[SimulatedRequest] = []
        rest: list[SimulatedRequest] = []
        for copy in range(-int(-copies // 1)):
            for session in self.sessions:
                if rng.random() >= copies - copy:
                    continue
                name = f"s{len(first)}"
                begins_s = rng.random() * self.start_within_s
                turns = [
                    _job(
                        turn,
                        f"{name}.{number}",
                        f"copy {copy}",
                        numbers,
                        arrival_s=inf if number else begins_s,
                        slo=slos[len(first) % len(slos)],
                    )
                    for number, turn in enumerate(session)
                ]
                for job, follower, (before, after) in zip(turns, turns[1:], pairwise(session), strict=False):
                    job.then, job.after_s = follower, after.at_s - before.at_s
                first.append(turns[0])
                rest += turns[1:]
        return sorted(first, key=lambda job: job.request.arrival_s) + rest


def _job(
    turn: SessionTurn,
    name: str,
    copy: str,
    numbers: dict[tuple[str, int], int],
    *,
    arrival_s: float,
    slo: Slo,
) -> SimulatedRequest:
    """`numbers` has one for each block of text: those of one copy are shared, the rest of a prompt is its own."""
    num_prompt = max(1, turn.input_tokens)
    num_full = min(num_prompt // BLOCK_TOKENS, len(turn.block_ids))
    texts = [(copy, block_id) for block_id in turn.block_ids[:num_full]]
    texts += [(name, index) for index in range(num_full, num_blocks_for(num_prompt, BLOCK_TOKENS))]
    ids = tuple(numbers.setdefault(text, len(numbers) + 1) for text in texts)
    request = Request(
        id=name,
        prompt=(),
        sampling=SamplingParams(max_tokens=max(1, turn.output_tokens)),
        reply_to="",
        slo=slo,
        arrival_s=arrival_s,
    )
    whole = ids[: num_prompt // BLOCK_TOKENS]
    return SimulatedRequest(request=request, ids=ids, hashes=block_hashes(whole, 1), num_prompt=num_prompt)
