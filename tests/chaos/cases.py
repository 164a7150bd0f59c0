"""The chaos matrix: every state of the hand-over x everything that may happen to a process in it; every message x every mistreatment.

A case brings one request into a state, holds the process that is in it with SIGSTOP, does the fault, lets go, and then expects: the
clients' tokens equal the undisturbed run, and nothing is held anywhere."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from tests.chaos.world import Process, Stream, World
from tests.patience import PATIENCE_S

DECODE_STATES = (
    "RESERVING", "GRANTED", "ACTIVE", "FENCING", "ASKING", "LOCAL", "RECALLING", "REVOKING", "CLOSING", "RELEASED",
)  # fmt: skip
PREFILL_STATES = ("COMPUTING", "SENDING", "STOPPING", "DONE")
STATES = tuple(f"decode.{s}" for s in DECODE_STATES) + tuple(f"prefill.{s}" for s in PREFILL_STATES)
FAULTS = (
    "kill prefill", "kill decode", "kill frontend", "kill scheduler",
    "stop prefill", "stop decode", "stop frontend", "stop scheduler",
    "restart prefill", "restart decode",
    "hang prefill", "hang decode",
    "seize prefill", "seize decode",
)  # fmt: skip
"""`restart` comes back on the same address. `stop` goes on after the others have given the process up. `hang`: its next step never
ends. `seize`: nor does any thread but the one that computes get the interpreter. It ends by itself then."""
_SEIZED = ("decode.GRANTED", "decode.ACTIVE", "decode.FENCING", "prefill.COMPUTING", "prefill.SENDING")
"""To its peers it is a stopped process, and it takes several times as long to end."""


def applies(state: str, fault: str) -> bool:
    """There is no prefill instance left in LOCAL: that is how a request gets there."""
    if fault.startswith("seize") and state not in _SEIZED:
        return False
    return not (state == "decode.LOCAL" and fault.endswith("prefill"))


KINDS = ("drop", "delay", "double", "swap", "cut")
MESSAGES: dict[str, tuple[str, str]] = {
    "Place": ("frontend", "plain"),
    "Placed": ("scheduler", "plain"),
    "Submit": ("frontend", "plain"),
    "StartPrefill": ("decode", "plain"),
    "ChunkDone": ("prefill", "plain"),
    "Commit": ("prefill", "plain"),
    "Tokens": ("decode", "plain"),
    "Finished": ("frontend", "plain"),
    "LoadReport": ("decode", "plain"),
    "Cancel": ("frontend", "cancel"),
    "Revoke": ("decode", "cancel"),
    "Drained": ("prefill", "cancel"),
    "NeedPrefill": ("decode", "lose"),
    "PrefillAssigned": ("scheduler", "lose"),
    "Register": ("prefill", "lose"),
}
"""Message: who sends it, and in what kind of run."""
CANCELLED = ("decode.REVOKING", "decode.CLOSING", "decode.RELEASED", "prefill.STOPPING")
STOP_S = 1.5


@dataclass(frozen=True)
class Outcome:
    case: str
    recovery_s: float
    """The longest pause that a client saw, from the moment of the fault."""
    restored_blocks: int = 0
    """Blocks that instances have read from lower tiers meanwhile, copies for a buddy among them."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of the prompts and answers of a case."""

    num_decoding: int = 1
    """The answers that are being decoded when the fault comes."""
    decoding_prompt: int = 20
    said_before: int = 2
    """Tokens of each of them that have come until the subject does."""
    decoding_answer: int = 60
    shared: int = 0
    """The subject begins as one in `_NUM_SHARED` did: with so many tokens of its prompt."""
    own: int = 40


SHORT = Lengths()
LONG = Lengths(num_decoding=2, decoding_prompt=80, said_before=12, decoding_answer=150, shared=72, own=24)
"""Both decode instances have an answer behind whose prompt a recurrent state leaves the pool. Others do behind what prompts share."""
_NUM_SHARED = 4
"""More beginnings of prompts than the pool keeps states of."""


class Case:
    """One subject on frontend0, and what is being decoded for frontend1 when the fault comes."""

    def __init__(self, world: World, name: str, lengths: Lengths = SHORT) -> None:
        self.world, self.name, self.lengths = world, name, lengths
        self.trapped: Process | None = None
        self.killed: dict[str, int] = {}
        self.hanging = ""
        """The process whose next step hangs, unless it has none."""

    async def run(self, state: str, fault: str) -> Outcome:
        before = await self.world.restored_blocks()
        if fault.startswith(("hang", "seize")):
            await self.warm()
        bystanders = [await self.decoding("frontend1") for _ in range(self.lengths.num_decoding)]
        async with self.held_in(state) as subject:
            assert self.trapped is not None
            started = asyncio.get_running_loop().time()
            await self.strike(fault, subject)
        await self.end(subject, cancelled=state in CANCELLED or fault == "kill frontend")
        for bystander in bystanders:
            await self.end(bystander)
        await self.repair()
        pause_s = max(self.pause_after(stream, started) for stream in (subject, *bystanders))
        after = await self.world.restored_blocks()
        restored = sum(max(0, count - before.get(address, 0)) for address, count in after.items())
        return Outcome(self.name, pause_s, restored)

    async def warm(self) -> None:
        """Have every instance compute, so that it knows how long its steps take."""
        while not all(
            [(await node.status())["computed"] for role in ("prefill", "decode") for node in self.of(role)]
        ):
            # At once: one after the other, all would go to the same idle instance.
            for stream in await asyncio.gather(*(self.decoding("frontend1") for _ in range(4))):
                await self.end(stream)

    def pause_after(self, stream: Stream, moment: float) -> float:
        """The longest gap that ends after `moment`."""
        at, longest = stream.last_at, 0.0
        for gap_s in reversed(stream.gaps_s):
            if at < moment:
                break
            longest = max(longest, min(gap_s, at - moment) if at - gap_s < moment else gap_s)
            at -= gap_s
        return longest

    async def decoding(self, frontend: str) -> Stream:
        prompt = self.world.fresh_prompt(self.lengths.decoding_prompt)
        stream = self.world.streams[self.world.generate(frontend, prompt, self.lengths.decoding_answer)]
        async with asyncio.timeout(PATIENCE_S):
            while len(stream.tokens) < self.lengths.said_before:
                await asyncio.sleep(0.005)
        return stream

    @contextlib.asynccontextmanager
    async def held_in(self, state: str) -> AsyncGenerator[Stream]:
        """A new request, whose process is stopped in `state` as long as the body runs."""
        world, side = self.world, state.partition(".")[0]
        nodes = await self.arm(side, state)
        before = await self.arm("prefill", "prefill.COMPUTING", state) if state in _WRITER_HELD else []
        if state == "decode.LOCAL":
            await self.kill("prefill1")
            before = [node for node in before if node.name != "prefill1"]
        if state == "decode.RECALLING":  # the first one is sent again
            await self.have_all("prefill", do="corrupt", frames=2)
        shared = world.shared_prompt(_NUM_SHARED, self.lengths.shared)
        name = world.generate("frontend0", shared + world.fresh_prompt(self.lengths.own), 20)
        if before:
            writer = await self.first_trapped(before)
            self.disarm("prefill", but=writer)
            await self.disturb(state, name, writer)
        self.trapped = await self.first_trapped(nodes)
        self.disarm(side, but=self.trapped)
        try:
            yield world.streams[name]
        finally:
            # On a busy machine the first is given up, and the next one that gets the request is stopped before it hears that it need
            # not be.
            for node in (*nodes, *before):
                world.thaw(node.name)

    async def disturb(self, state: str, name: str, writer: Process) -> None:
        """The writer is stopped while it computes: now what leads to the wanted state."""
        world = self.world
        if state in ("decode.FENCING", "decode.ASKING", "decode.LOCAL"):
            await self.kill(writer.name)
            return
        world.nodes["frontend0"].do(do="cancel", id=f"{name}@frontend0")
        await asyncio.sleep(0.1)  # the Cancel is on its way
        if state == "decode.CLOSING":
            await self.kill(writer.name)
        elif state != "decode.REVOKING":
            world.thaw(writer.name)

    async def strike(self, fault: str, subject: Stream) -> None:
        kind, _, role = fault.partition(" ")
        assert self.trapped is not None
        victim = await self.victim(role)
        if kind == "stop":
            self.world.freeze(victim)
            if victim != self.trapped.name:
                self.world.thaw(self.trapped.name)
            await asyncio.sleep(STOP_S)
            self.world.thaw(victim)
            return
        if kind in ("hang", "seize"):
            self.hanging = victim
            self.world.nodes[victim].do(do="hang", how="step" if kind == "hang" else "interpreter")
            return
        await self.kill(victim)
        if kind == "restart":
            await self.world.start(victim, self.killed.pop(victim))

    async def victim(self, role: str) -> str:
        """The process of this role that serves the subject."""
        assert self.trapped is not None
        if role == self.trapped.role:
            return self.trapped.name
        if role == "scheduler":
            return "scheduler"
        if role == "frontend":
            return "frontend0"
        prefill, decode = await self.world.route("frontend0")
        wanted = prefill if role == "prefill" else decode
        living = [node.name for node in self.of(role)]
        return wanted if wanted in living else living[0]

    async def kill(self, name: str) -> None:
        self.killed[name] = await self.world.kill(name)

    async def repair(self) -> None:
        """Replace what was killed, or has ended by itself, as Serve would; then nothing may be left of the past."""
        if self.hanging and not await self.world.nodes[self.hanging].goes_on():
            await self.kill(self.hanging)
        self.hanging = ""
        for name in self.killed:
            await self.world.start(name)
        self.killed.clear()
        await self.world.settled()
        assert not self.world.segments_left()

    async def end(self, stream: Stream, cancelled: bool = False) -> None:
        if cancelled:
            assert tuple(stream.tokens) == stream.expected[: len(stream.tokens)], self.name
            return
        async with asyncio.timeout(PATIENCE_S):
            await stream.done.wait()
        assert not stream.error, f"{self.name}: {stream.error}"
        assert tuple(stream.tokens) == stream.expected, f"{self.name}: wrong tokens"

    def of(self, role: str) -> list[Process]:
        nodes = self.world.nodes.values()
        return [n for n in nodes if n.role == role and n.process.is_alive]

    async def have_all(self, role: str, **command: Any) -> list[Process]:
        """Have all processes of a role carry a command out, and return them."""
        nodes = self.of(role)
        await asyncio.gather(*(node.carry_out(**command) for node in nodes))
        return nodes

    async def arm(self, role: str, *states: str) -> list[Process]:
        """Set the traps of all processes of a role. They are set on return: a request that comes next falls into one of them."""
        return await self.have_all(role, do="trap", states=states)

    def disarm(self, role: str, but: Process) -> None:
        """Take the traps of all others away, one of which may have stopped in its own already."""
        for node in self.of(role):
            if node is not but:
                node.do(do="trap", states=())

    async def first_trapped(self, nodes: list[Process]) -> Process:
        waits = {asyncio.create_task(node.wait_for("trapped", PATIENCE_S)): node for node in nodes}
        done, rest = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        first = done.pop()
        first.result()
        await waits[first].has_stopped()
        return waits[first]


_WRITER_HELD = (
    "decode.FENCING", "decode.ASKING", "decode.LOCAL", "decode.REVOKING", "decode.CLOSING", "decode.RELEASED", "prefill.STOPPING",
)  # fmt: skip
"""States that are reached by something that happens while the prefill instance computes."""


async def slow_link(world: World, name: str) -> Outcome:
    """Six prompts over a link on which every write takes 20 ms more; then it is well again."""
    case = Case(world, name)
    await case.have_all("prefill", do="slow", write_s=0.02)
    names = [world.generate("frontend0", world.fresh_prompt(40), 12) for _ in range(6)]
    for stream in [world.streams[n] for n in names]:
        await case.end(stream)
    await case.have_all("prefill", do="slow", write_s=0.0)
    await case.repair()
    return Outcome(name, max(max(world.streams[n].gaps_s) for n in names))


async def mistreat(world: World, name: str, message: str, kind: str) -> Outcome:
    """The next `message` from every process of its sender's role is dropped, doubled ... under a plain run, or one with a loss."""
    case = Case(world, name)
    role, run = MESSAGES[message]
    await case.have_all(role, do="fate", message=message, kind=kind)
    if run == "plain":
        streams = [world.streams[world.generate("frontend0", world.fresh_prompt(40), 12)]]
    else:
        writers = await case.arm("prefill", "prefill.COMPUTING")
        stream = world.generate("frontend0", world.fresh_prompt(40), 12)
        writer = await case.first_trapped(writers)
        case.disarm("prefill", but=writer)
        streams = [world.streams[stream]]
        if run == "cancel":
            world.nodes["frontend0"].do(do="cancel", id=f"{stream}@frontend0")
            await asyncio.sleep(0.1)
            world.thaw(writer.name)
        else:
            await case.kill(writer.name)
    for stream in streams:
        await case.end(stream, cancelled=run == "cancel")
    for node in case.of(role):
        node.do(do="fate", message=message, kind="pass")
    started = asyncio.get_running_loop().time()
    await case.repair()
    quiet_s = asyncio.get_running_loop().time() - started
    return Outcome(case.name, max([quiet_s, *(max(s.gaps_s, default=0.0) for s in streams)]))
