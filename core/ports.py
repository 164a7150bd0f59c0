"""The seams: what each part asks of its neighbours. Everything behind them can be replaced, and is, in the simulator."""

from collections.abc import Awaitable, Callable, Collection, Sequence, Sized
from typing import Protocol, TypeVar

from core.config.adapter_config import HoldAdapters
from core.cost.steps import StepModels
from core.errors import Hung
from core.messages import Message
from core.plan import FailedSeq, StepPlan, StepResult
from core.scheduler_tuning import SchedulerTuning
from core.types import Request, TokenOut


class Clock(Protocol):
    def now(self) -> float: ...
    async def sleep(self, delay_s: float) -> None: ...


class Mail(Protocol):
    """Ordered, authenticated messages between peers. A peer is named by its address.

    `on_message(sender, message)` and `on_lost(peer)` are called on the event loop and must not block. Messages to one peer arrive
    exactly once and in order, or each side reports the other lost, once. A peer that was only stopped or cut off may be heard
    again after that: as one that knows of nothing that was said before."""

    @property
    def address(self) -> str: ...
    def listen(self, on_message: Callable[[str, Message], None], on_lost: Callable[[str], None]) -> None: ...
    def send(self, to: str, message: Message) -> None:
        """Queue `message`; connects when needed. Never blocks and never raises: an unreachable peer is reported lost."""
        ...

    async def close(self) -> None: ...


class DeviceWork(Protocol):
    """Work that was given to a device."""

    def query(self) -> bool:
        """Return whether it is done, without waiting. Raises where it has failed."""
        ...


class LayerDone(Protocol):
    """Called with a rank and a layer of which all KV of the step is in the rank's pool, or was launched. Layers are those of the
    model that keep KV, in their order. `after` has it there when it is done. None: what was launched so far has."""

    def __call__(self, rank: int, layer: int, after: DeviceWork | None = None, /) -> None: ...


class KnowsScheduler(Protocol):
    @property
    def scheduler(self) -> str:
        """The address of a scheduler that lives; empty where none is known."""
        ...


class LayerSink(Protocol):
    """Learns of a step's layers as they are computed, on a rank's compute thread or on the event loop's."""

    def step_started(self, plan: StepPlan) -> LayerDone | None:
        """Start a step, before its first touch of the KV pool. The result is called with each layer when its KV is in the pool,
        before the layer reads it, or, for a step that is replayed, once all of it is launched. None means that nothing waits for
        them."""
        ...


OnReady = Callable[[str, int], None]
"""(key, num_tokens): the sample behind this many tokens of the sequence was put off, and can be made now."""


class WorkerGroup(Protocol):
    """The ranks of one instance. Steps run in the order of the calls; a second call may come while the first runs.

    All writes of a step are in the KV pool when its result is returned."""

    def execute(self, plan: StepPlan) -> Awaitable[StepResult]:
        """Raises OutOfMemory where there is no memory for the step, and for those behind it until its number comes again. Such a
        step has sampled nothing. What it has written behind the tokens that were computed before is of no use, nor is any
        recurrent state of its sequences, and ranks may or may not have taken note of its `new` and `drop`."""
        ...

    async def hold_adapters(self, asked: HoldAdapters) -> dict[str, str]:
        """Have every rank hold these adapters beside those of its start, and no others, while steps run. What is given up must be
        in no step. Returns why not, by key, where a rank has refused; others may hold it. For one call at a time."""
        ...

    def on_ready(self, hear: OnReady) -> None:
        """`hear` is called on the running event loop for each sample that a result lacks, perhaps before that result is here."""
        ...

    async def lost(self) -> Exception:
        """Wait until a rank has failed by itself, also between steps. No step can be executed from then on."""
        ...

    async def give_up(self, why: str) -> Hung:
        """End the ranks at once, whatever they do, since a step does not end. Return what to report, which says `why`.

        No step can be executed from then on, and those that are awaited may never have a result."""
        ...

    async def close(self) -> None: ...


class ServedSequence(Protocol):
    """What a SchedulerPolicy asks of a sequence: engine.planning.sequence.Sequence, or a modelled one."""

    @property
    def request(self) -> Request: ...
    @property
    def arrival(self) -> int:
        """Its place in the order of arrival on this instance."""
        ...

    @property
    def tokens(self) -> Sized:
        """Its known tokens."""
        ...

    @property
    def num_output(self) -> int: ...
    @property
    def num_computed(self) -> int: ...
    @property
    def first_token_at(self) -> float:
        """When its first output token was on this instance; infinite before."""
        ...

    @property
    def num_after_first(self) -> int:
        """The output tokens that will have followed it when the step that is being planned is over."""
        ...


S = TypeVar("S", bound=ServedSequence)


class SchedulerPolicy(Protocol[S]):
    """The order in which an engine serves its sequences."""

    @property
    def tuning(self) -> SchedulerTuning:
        """What its instance's step planning decides by."""
        ...

    def order(self, waiting: Sequence[S], now: float) -> Sequence[S]:
        """Order sequences of equal urgency."""
        ...

    def prompt_tokens(
        self,
        decoding: Sequence[S],
        context_tokens: int,
        prompts: Sequence[S],
        steps: StepModels,
        budget_tokens: int,
        starts_at: float,
    ) -> int:
        """Return how many of `budget_tokens` a step that begins at `starts_at` may spend on `prompts`, those that wait among
        them, beside `decoding`."""
        ...

    def turn(self, seq: S, now: float, steps: StepModels) -> tuple[float, bool]:
        """Return the prompt's turn. Lower turns are computed first, also before prompts that have been begun."""
        ...

    def victim(self, running: Sequence[S]) -> S: ...


class TokenCodec(Protocol):
    """Text to token ids and back; a tokenizer without its library."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


Resolve = Callable[[], Awaitable[Collection[str]]]
"""Looks the current addresses of all schedulers up (service discovery)."""


class EngineEvents(Protocol):
    """What an engine tells the instance that it runs in. The engine's own task makes the calls."""

    def on_tokens(self, tokens: list[TokenOut]) -> None:
        """Take all tokens that a step has sampled. Called before the next step is planned."""
        ...

    def on_stuck(self, keys: list[str]) -> None:
        """Abort these pushed sequences: they wait for blocks that only others can free."""
        ...

    def on_taken_back(self, paused: list[str], lost: list[str]) -> None:
        """Call `go_on` with each of these `paused` pushed sequences when nothing of it is being read any more: a step that may
        have sent some of its KV on was taken back. Abort those that are `lost`."""
        ...

    def on_failed(self, failed: Sequence[FailedSeq]) -> None:
        """Let these fail: a step could not compute them, and they are aborted."""
        ...

    def on_error(self, error: BaseException) -> None:
        """Note that the ranks have failed and the engine has stopped. Called once."""
        ...
