"""Agents' sessions in closed loop: each turn comes a gap after the one before it was answered, however long that took.

A file has JSON lines with `session_id`, `turn`, `input_length`, `output_length`, and the gap before the turn (a client thinks, a
tool runs) as `gap_ms`; or, as LMCache's agent trace, `t_ms`, the turn's start in its session, whose differences are then the
gaps. `hash_runs`, [[first, count], ...] of 64-token blocks, say which prompts begin alike; without them each prompt goes on from
the one before. The load is scaled by superposing copies of all sessions, with prefixes of their own; sessions begin at random in
`start_within_s`. A turn that is refused does not end its session.

Invariant: a prompt has the answer before it where the trace leaves room for all of it behind the prompt before."""

import gzip
import json
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from core.kv import block_hashes, num_blocks_for
from core.types import Request, SamplingParams, Slo
from sim.coarse.simulated_sequence import SimulatedRequest
from sim.simulated_run import Arrival
from sim.trace_workload import prompt_of

BLOCK_TOKENS = 64
_OWN_BLOCKS = 1 << 40
"""Ids from here on are those of sessions without `hash_runs`, so many for each."""
_MOST_BLOCKS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTurn:
    gap_s: float
    """Between the answer before and this turn."""
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    """Equal leading ids mean equal leading text; the last block may be partial."""

    def num_shared(self, before: "SessionTurn") -> int:
        """Return the tokens of the prompt before that this one begins with; of a partial block none."""
        num_full = min(before.input_tokens, self.input_tokens) // BLOCK_TOKENS
        pairs = zip(before.block_ids[:num_full], self.block_ids[:num_full], strict=False)
        return BLOCK_TOKENS * next((i for i, (a, b) in enumerate(pairs) if a != b), num_full)

    def has_answer_of(self, before: "SessionTurn") -> bool:
        """Return whether all of the answer before follows the prompt before in this prompt."""
        whole = before.input_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        return (
            self.num_shared(before) >= whole
            and self.input_tokens >= before.input_tokens + before.output_tokens
        )


Session = tuple[SessionTurn, ...]


def is_session_trace(path: Path) -> bool:
    """Return whether a file's first line is a session's turn. Raises ConfigError for a file that cannot be read."""
    return '"session_id"' in _text(path).partition("\n")[0]


def read_sessions(path: Path) -> list[Session]:
    """Return the sessions of a trace, in the order in which it has them. Raises ConfigError."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    try:
        for line in _text(path).splitlines():
            item = json.loads(line)
            found.setdefault(item["session_id"], []).append(item)
        return [_session(number, items) for number, items in enumerate(found.values())]
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} does not hold sessions: {type(error).__name__} {error}") from None


def _text(path: Path) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}") from None


def _session(number: int, items: Sequence[Mapping[str, Any]]) -> Session:
    items = sorted(items, key=lambda item: item["turn"])
    ids = _OWN_BLOCKS + number * _MOST_BLOCKS
    turns: list[SessionTurn] = []
    for before, item in zip((None, *items), items, strict=False):
        count = num_blocks_for(max(1, item["input_length"]), BLOCK_TOKENS)
        turns.append(
            SessionTurn(
                gap_s=0.0 if before is None else _gap_s(before, item),
                input_tokens=max(1, item["input_length"]),
                output_tokens=max(1, item["output_length"]),
                block_ids=tuple(
                    first + i for first, count in item.get("hash_runs", [[ids, count]]) for i in range(count)
                ),
            )
        )
    return tuple(turns)


def _gap_s(before: Mapping[str, Any], item: Mapping[str, Any]) -> float:
    gap_ms = item["gap_ms"] if "gap_ms" in item else item["t_ms"] - before["t_ms"]
    return max(0.0, gap_ms / 1000)


@dataclass(frozen=True, slots=True)
class _Begun:
    """One copy of a session, and when it begins."""

    name: str
    copy: int
    begins_at: float
    turns: Session


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLoad:
    """sim.goodput.Offered."""

    sessions: Sequence[Session]
    start_within_s: float
    block_tokens: int = BLOCK_TOKENS
    ends_at: float = inf
    """Turns that cannot come before this, however soon they are answered, are left out."""

    @property
    def rate(self) -> float:
        """Turns per second of one copy, by how many sessions begin in a second."""
        return sum(map(len, self.sessions)) / self.start_within_s

    def jobs(
        self, copies: float, seed: int, slo: Slo | Sequence[Slo], share: float = 1.0
    ) -> list[SimulatedRequest]:
        """Return all turns: the first ones, by arrival, and then those that follow. A session is of one class. `share`: what is
        kept of each copy's sessions, at random."""
        slos = [slo] if isinstance(slo, Slo) else slo
        numbers: dict[tuple[str, int], int] = {}
        first: list[SimulatedRequest] = []
        rest: list[SimulatedRequest] = []
        for begun in self._begun(copies, seed, share):
            turns = [
                _job(
                    turn,
                    f"{begun.name}.{number}",
                    f"copy {begun.copy}",
                    numbers,
                    arrival_at=inf if number else begun.begins_at,
                    slo=slos[len(first) % len(slos)],
                )
                for number, turn in enumerate(begun.turns)
            ]
            pairs = zip(pairwise(turns), pairwise(begun.turns), strict=True)
            for (job, follower), (before, after) in pairs:
                job.then, job.after_s = follower, after.gap_s
                if after.has_answer_of(before):
                    job.answer_ids = follower.ids[job.num_prompt // BLOCK_TOKENS :]
            first.append(turns[0])
            rest += turns[1:]
        return sorted(first, key=lambda job: job.request.arrival_at) + rest

    def arrivals(self, copies: float, seed: int) -> list[Arrival]:
        """Return the same turns for the full simulation: the first ones, by arrival, and then those that follow."""
        keys: dict[tuple[int, int], int] = {}
        begun = sorted(self._begun(copies, seed), key=lambda one: one.begins_at)
        found = [
            Arrival(one.begins_at, _prompt(one, 0, keys, number), one.turns[0].output_tokens, seed + number)
            for number, one in enumerate(begun)
        ]
        for opener, one in enumerate(begun):
            follows = opener
            for index, (before, turn) in enumerate(pairwise(one.turns), 1):
                number, has_answer = len(found), turn.has_answer_of(before)
                found.append(
                    Arrival(
                        turn.gap_s,
                        _prompt(one, index, keys, number),
                        turn.output_tokens,
                        seed + number,
                        follows=follows,
                        num_shared=before.input_tokens if has_answer else turn.num_shared(before),
                        has_answer=has_answer,
                    )
                )
                follows = number
        return found

    def _begun(self, copies: float, seed: int, share: float = 1.0) -> Iterator[_Begun]:
        rng, count = random.Random(seed), 0
        for copy in range(-int(-copies // 1)):
            for session in self.sessions:
                if rng.random() < min(1.0, copies - copy) * share:
                    begins_at = rng.random() * self.start_within_s
                    yield _Begun(f"s{count}", copy, begins_at, self._until(session, begins_at))
                    count += 1

    def _until(self, session: Session, begins_at: float) -> Session:
        times = accumulate((turn.gap_s for turn in session), initial=begins_at)
        next(times)
        return tuple(
            turn for turn, earliest_at in zip(session, times, strict=True) if earliest_at < self.ends_at
        )


def _prompt(begun: _Begun, index: int, keys: dict[tuple[int, int], int], number: int) -> tuple[int, ...]:
    turn = begun.turns[index]
    num_full = turn.input_tokens // BLOCK_TOKENS
    shared = [keys.setdefault((begun.copy, id_), 2 * len(keys)) for id_ in turn.block_ids[:num_full]]
    return prompt_of(shared, BLOCK_TOKENS, turn.input_tokens, 2 * number + 1)


def _job(
    turn: SessionTurn,
    name: str,
    copy: str,
    numbers: dict[tuple[str, int], int],
    *,
    arrival_at: float,
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
        arrival_at=arrival_at,
    )
    whole = ids[: num_prompt // BLOCK_TOKENS]
    return SimulatedRequest(request=request, ids=ids, hashes=block_hashes(whole, 1), num_prompt=num_prompt)
