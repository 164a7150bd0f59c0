"""Ranks that hang, under streams whose tokens are `transformers`' own. `python -m tests.chaos.hung_ranks [GROUP ...] --json FILE` tries
every rank of groups of ranks, decoding and prefilling, and writes the longest pauses; pytest tries a part.

A stopped rank is one that is swapped out, or whose driver holds it. One that hangs in a step waits for its device or for a peer
that never comes; its process lives on. One that keeps the interpreter has a thread that computes, and lets no other one run."""

import asyncio
import ctypes
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from benchmarks.report import parser, write
from cluster.instance.instance import Instance
from cluster.local import LocalCluster
from core.errors import Hung
from core.types import Request, SamplingParams
from engine.ranks.rank import Rank, rank_name
from engine.ranks.rank_messages import RankSetup
from engine.ranks.rank_process import serve_instance
from tests.parallel.forked_child import ForkedChild, forked_children
from tests.parallel.test_served import checkpoint, settings
from tests.patience import PATIENCE_S, until

FAULTS = {
    "stopped": signal.SIGSTOP,
    "hung in a step": signal.SIGUSR1,
    "keeps the interpreter": signal.SIGUSR2,
}
LENGTH = 48
LENGTHS = {
    "decode": ((18, 20), (13, 9), (0, 30), (18, 3)),
    "prefill": ((18, 60), (13, 55), (0, 75), (18, 40)),
}
"""Tokens that prompts begin with alike, and others. A prompt takes a prefill instance several steps, in which it can hang."""
TIMEOUT_S = 2.0
OVERRIDES: dict[str, Any] = {
    "mail.heartbeat_s": 0.2,
    "mail.peer_timeout_s": TIMEOUT_S,
}
_FOR_EVER_S = 1_000_000
_MOST_PROCESSES, _MOST_ASKERS = 12, 50


@dataclass(frozen=True, slots=True)
class Group:
    """Several ranks of an instance."""

    name: str
    family: str
    axes: tuple[str, ...]
    """Two ranks along each of them."""

    @property
    def num_ranks(self) -> int:
        return 2 ** len(self.axes)


GROUPS = (
    Group("tp2", "llama", ("tp",)),
    Group("pp2", "llama", ("pp",)),
    Group("ep2", "mixtral", ("ep",)),
    Group("dp2", "deepseek_v3", ("dp",)),
    Group("tp2 x pp2", "llama", ("tp", "pp")),
    Group("dp2 x ep2", "mixtral", ("dp", "ep")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    group: str
    role: str
    rank: int
    fault: str
    right: bool
    pause_s: float
    """The longest that a client waited for a token, from the fault on."""
    why: str
    """What the instance says of its end."""


def rank_that_hangs(sock: socket.socket) -> int:
    """Serve as a rank, until a signal says how to hang."""
    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(_FOR_EVER_S))
    signal.signal(signal.SIGUSR2, lambda *_: ctypes.PyDLL(None).sleep(_FOR_EVER_S))
    return serve_instance(sock)


def _start(setups: Sequence[RankSetup], deadline_s: float) -> list[Rank]:
    return [ForkedChild(rank_name(setup), rank_that_hangs) for setup in setups]


async def try_ranks(group: Group, role: str, cases: Sequence[tuple[int, str]], folder: Path) -> list[Outcome]:
    """Hang one rank after the other, (number, fault), each of another instance. One more instance is left at the end."""
    prompts, want = checkpoint(folder, group.family, LENGTHS[role], num_tokens=LENGTH)
    keys = {f"{role}.{axis}": 2 for axis in group.axes} | {f"{role}_instances": len(cases) + 1}
    if role == "prefill":
        keys |= {"decode_instances": 1, "engine.num_blocks": 480}
    else:
        keys |= {"prefill_instances": 0}
    with mock.patch("engine.ranks.child_ranks.start_children", _start):
        async with LocalCluster.running(settings(folder, **OVERRIDES, **keys)) as cluster:
            instances = [one for one in cluster.instances if one.role == role]
            ranks = forked_children(rank_that_hangs)
            await _stream(cluster, prompts)  # so that steps are known
            found: list[Outcome] = []
            for (number, fault), instance in zip(cases, instances, strict=False):
                own = ranks[: group.num_ranks]
                del ranks[: group.num_ranks]
                right, pause_s = await _under(cluster, instance, own[number], FAULTS[fault], (prompts, want))
                await until(lambda own=own: not any(rank.is_running() and _lives(rank) for rank in own))
                found.append(
                    Outcome(
                        group=group.name,
                        role=role,
                        rank=number,
                        fault=fault,
                        right=right and isinstance(instance.failure, Hung),
                        pause_s=pause_s,
                        why=str(instance.failure),
                    )
                )
            return found


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def _under(
    cluster: LocalCluster,
    instance: Instance,
    rank: psutil.Process,
    number: signal.Signals,
    asked: tuple[list[tuple[int, ...]], list[list[int]]],
) -> tuple[bool, float]:
    """Hang a rank of the instance while it works, and return whether all tokens were right, and the longest pause."""
    prompts, want = asked
    num_askers, running = 3, list[asyncio.Task[list[Stream]]]()
    while not instance.num_used_blocks and num_askers < _MOST_ASKERS:
        await asyncio.gather(*running)
        running = [asyncio.create_task(_stream(cluster, prompts)) for _ in range(num_askers)]
        await until(lambda on=running: instance.num_used_blocks > 0 or all(task.done() for task in on))
        num_askers *= 2  # others may take all of a few
    struck_at = time.monotonic()
    rank.send_signal(number)
    streams = [stream for task in running for stream in await task]
    deadline = struck_at + PATIENCE_S
    while instance.failure is None and time.monotonic() < deadline:
        # It had no work. A rank that hangs without a step to compute is noticed with the next one.
        more = await asyncio.gather(*(_stream(cluster, prompts) for _ in range(num_askers)))
        streams += [stream for each in more for stream in each]
    expected = [*want] * (len(streams) // len(want))
    right = [[token for token, _ in stream] for stream in streams] == expected
    return right, max(_pause_after(stream, struck_at) for stream in streams)


Stream = list[tuple[int, float]]


async def _stream(cluster: LocalCluster, prompts: Sequence[tuple[int, ...]]) -> list[Stream]:
    """Return each answer's tokens, and when they came. The first is the time of asking. No prefix is cached from earlier calls:
    a decode instance that has one computes the little that is left of the prompt by itself."""
    frontend = cluster.frontend
    salt = frontend.new_request_id()

    async def one(prompt: tuple[int, ...]) -> Stream:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=LENGTH, min_tokens=LENGTH, masked_until_min=(1,)
        )
        request = Request(
            id=frontend.new_request_id(),
            prompt=prompt,
            sampling=sampling,
            reply_to=frontend.address,
            salt=salt,
        )
        return [(token.token, time.monotonic()) async for token in frontend.generate(request)]

    return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


def _pause_after(stream: Stream, moment: float) -> float:
    """Return the longest wait for a token that ended after `moment`, counted from there at the soonest."""
    times = [moment, *(at for _, at in stream if at > moment)]
    return max((after - before for before, after in pairwise(times)), default=0.0)


def table(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for fault in FAULTS:
        for role in ("prefill", "decode"):
            own = [one for one in outcomes if (one.fault, one.role) == (fault, role)]
            rows.append(
                {
                    "fault": f"a rank of {role}: {fault}",
                    "cases": len(own),
                    "failed": sum(not one.right for one in own),
                    "longest_pause_s": round(max((one.pause_s for one in own), default=0.0), 2),
                }
            )
    return rows


def _try_all(group: Group, role: str, *, smoke: bool) -> list[Outcome]:
    """Try every rank with every fault, with at most so many processes at a time."""
    cases = [(rank, fault) for fault in FAULTS for rank in range(group.num_ranks)]
    at_once = 1 if smoke else _MOST_PROCESSES // group.num_ranks
    found: list[Outcome] = []
    for first in range(0, 1 if smoke else len(cases), at_once):
        with tempfile.TemporaryDirectory() as folder:
            part = cases[first : first + at_once]
            found += asyncio.run(try_ranks(group, role, part, Path(folder)))
    return found


def main() -> None:
    options = parser(__doc__, must_write=True)
    names = [group.name for group in GROUPS]
    options.add_argument("groups", nargs="*", help=f"of {', '.join(names)}; all of them by default")
    args = options.parse_args()
    if unknown := set(args.groups) - set(names):
        options.error(f"there are no groups {', '.join(unknown)}, but {', '.join(names)}")
    chosen = [group for group in GROUPS if group.name in (args.groups or names)]
    outcomes = [
        outcome
        for group in (chosen[:1] if args.smoke else chosen)
        for role in ("decode", "prefill")
        for outcome in _try_all(group, role, smoke=args.smoke)
    ]
    content = {
        "set_up": OVERRIDES,
        "rows": table(outcomes),
        "failures": [repr(one) for one in outcomes if not one.right],
    }
    write(args.json, f"tests.chaos.hung_ranks {' '.join(args.groups)} --json FILE", content)


if __name__ == "__main__":
    main()
