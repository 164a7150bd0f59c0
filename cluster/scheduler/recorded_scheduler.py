"""Records what the scheduler was told, when, and what it decided, in a file; and tells a new one the same again.

The scheduler is a function of its events, so a replay decides the same, line by line. What other code would have decided on a
day's real events is one command away (`baton replay`). The file has no prompts in it, only hashes of their blocks. It holds the
configuration, then one msgpack array for each event, (now, sender, message), and one string for each decision, in order."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack

from cluster.scheduler.fleet.roster import SCAN_UP_TO
from cluster.scheduler.global_scheduler import GlobalScheduler
from cluster.scheduler.scheduler_events import (
    Event,
    OperatorAsked,
    PeerLost,
    PrefillNeeded,
    RequestArrived,
    RequestLeft,
    Send,
    Tick,
)
from core.config.cluster_config import ScheduleConfig
from core.errors import ConfigError
from core.messages import Finished, NeedPrefill, PlaceRequest
from core.sleep_messages import AskSleep, AskWake
from net.codec import decode, encode

log = logging.getLogger(__name__)


def make_scheduler(config: ScheduleConfig, name: str = "") -> GlobalScheduler:
    """Make a scheduler. It is recorded if the configuration says so, in a file of its own where several have names. Raises
    ConfigError when it cannot be written."""
    if not config.record_path:
        return GlobalScheduler(config)
    path = Path(f"{config.record_path}.{name}" if name else config.record_path)
    try:
        if path.exists():  # perhaps of a scheduler that an event has ended
            path.replace(path.with_name(f"{path.name}.before"))
        path.write_bytes(b"")
        return RecordedScheduler(config, path)
    except OSError as error:
        raise ConfigError(f"schedule.record_path: {error}") from None


class RecordedScheduler(GlobalScheduler):
    """Writes each event before it is acted upon, so that an event that ends the process is in the file."""

    def __init__(self, config: ScheduleConfig, path: Path, scan_up_to: int = SCAN_UP_TO) -> None:
        self._path, self._is_recording = path, True
        super().__init__(config, log=self._write, scan_up_to=scan_up_to)
        self._write(config.model_dump_json())

    def on(self, event: Event, now: float) -> list[Send]:
        self._write([now, *_as_plain(event)])
        return super().on(event, now)

    def _write(self, item: Any) -> None:
        """Write. A full disk ends the recording, not the scheduler."""
        if not self._is_recording:
            return
        try:
            with self._path.open("ab") as file:
                file.write(msgpack.packb(item))  # type: ignore[arg-type]
        except OSError as error:
            self._is_recording = False
            log.error("schedule.record_path: nothing more is recorded: %s", error)


def replay(path: Path, shadow_tuning: Mapping[str, float] | None = None) -> tuple[list[str], list[str]]:
    """Return (decisions in the file, decisions of a new scheduler with the same configuration and events). `shadow_tuning`: in
    place of the configuration's. Raises ConfigError."""
    recorded: list[str] = []
    decided: list[str] = []
    config, items = read(path)
    if shadow_tuning is not None:
        config = config.model_copy(update={"shadow_tuning": shadow_tuning})
    scheduler = GlobalScheduler(config, log=decided.append)
    for item in items:
        if isinstance(item, str):
            recorded.append(item)
        else:
            event, now = item
            scheduler.on(event, now)
    return recorded, decided


def read(path: Path) -> tuple[ScheduleConfig, Iterator[tuple[Event, float] | str]]:
    """Return (its configuration; events with their times, and decisions, read as they are asked for). Raises ConfigError, also
    later."""
    items = _read(path)
    first = next(items, None)
    if not isinstance(first, str):
        raise ConfigError(f"{path} is no recording of a scheduler")
    config = ScheduleConfig.model_validate_json(first).model_copy(update={"record_path": ""})
    return config, (
        item if isinstance(item, str) else (_as_event(item[1], item[2]), item[0]) for item in items
    )


def _read(path: Path) -> Iterator[Any]:
    """Read the file's items. A last item that was cut short is left out."""
    try:
        with path.open("rb") as file:
            yield from msgpack.Unpacker(file)
    except (OSError, ValueError, msgpack.UnpackException) as error:
        raise ConfigError(f"cannot read the recording {path}: {error}") from None


def _as_plain(event: Event) -> tuple[str, bytes]:
    match event:
        case RequestArrived(frontend, place):
            return frontend, encode(place)
        case PrefillNeeded(instance, need):
            return instance, encode(need)
        case RequestLeft(frontend, ended):
            return frontend, encode(ended)
        case OperatorAsked(frontend, ask):
            return frontend, encode(ask)
        case PeerLost(address):
            return address, b""
        case Tick():
            return "", b""
        case _:
            return "", encode(event)


def _as_event(who: str, data: bytes) -> Event:
    if not data:
        return PeerLost(who) if who else Tick()
    match decode(data):
        case PlaceRequest() as place:
            return RequestArrived(who, place)
        case NeedPrefill() as need:
            return PrefillNeeded(who, need)
        case Finished() as ended if who:
            return RequestLeft(who, ended)
        case AskSleep() | AskWake() as ask:
            return OperatorAsked(who, ask)
        case message:
            return message  # type: ignore[return-value]
