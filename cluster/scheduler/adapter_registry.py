"""The list of the adapters that are loaded while the cluster runs, as one scheduler sees it. The one that leads owns it.

Everybody brings what he has to what the list says, and says so: an instance which version it has (`AdaptersHeld`), an ingress
which one it goes by and what its running requests still need (`AdaptersUsed`). An adapter is listed as `loading` until every
instance has it, then as `serving`. One that goes is `retiring` until no ingress needs it, and leaves the list then, so that
instances give it up.

Who is new tells his list first, and is told a later one. So a scheduler that has come anew, or leads anew, goes on where the last
one stood; only what that one was asked for and had not done is taken back."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from core.adapter_messages import (
    EMPTY_LIST,
    AdapterChanged,
    AdapterList,
    AdaptersHeld,
    AdaptersUsed,
    ListedAdapter,
    ListVersion,
    LoadAdapter,
    UnloadAdapter,
)
from core.config.adapter_config import adapter_name

LOAD_S: Final = 120.0
"""The time that instances have to load an adapter."""
SETTLE_S: Final = 10.0
"""The time in which a scheduler that has its list from others hears from every ingress what they still need."""
_ANOTHER_LEADS: Final = "another scheduler leads now: ask again"
Word = tuple[str, AdapterList | AdapterChanged]
"""Whom to tell what."""


@dataclass(slots=True, kw_only=True)
class _Change:
    """What was asked for, until it is answered."""

    asker: str
    nonce: int
    key: str
    await_for: Callable[["_Change", float], None]
    """Goes on with it where what it waits for has come."""
    version: ListVersion
    """The version that it waits for others to have."""
    due_at: float
    why: str = ""
    answer: AdapterChanged | None = None


class AdapterRegistry:
    """Feed it messages, with `now` never going back, and send what it returns, in this order."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._list = EMPTY_LIST
        self._held: dict[str, AdaptersHeld] = {}
        """By instance, what it has said last."""
        self._used: dict[str, AdaptersUsed] = {}
        """The same by ingress."""
        self._settled_at = 0.0
        self._changes: list[_Change] = []
        self._peers: tuple[str, ...] = ()
        self._out: list[Word] = []

    @property
    def listed(self) -> AdapterList:
        return self._list

    @property
    def leads(self) -> bool:
        """Whether this scheduler is the one of several that owns the list."""
        return all(self._me < peer for peer in self._peers)

    def restore(self, kept: AdapterList, now: float) -> None:
        """Go on, before any message, where the scheduler stood that has kept this list."""
        if kept.version > self._list.version:
            self._list, self._settled_at = kept, now + SETTLE_S

    @property
    def is_changing(self) -> bool:
        """Whether time matters: `tick` is to be called now and then."""
        return bool(self._changes) or any(each.state != "serving" for each in self._list.adapters)

    def is_current(self, instance: str) -> bool:
        """Return whether the instance may be given requests: it has all that is listed, or has never spoken of adapters."""
        held = self._held.get(instance)
        return held is None or held.version >= self._list.version

    def on(
        self,
        sender: str,
        message: AdapterList | AdaptersHeld | AdaptersUsed | LoadAdapter | UnloadAdapter,
        peers: tuple[str, ...],
        now: float,
    ) -> list[Word]:
        """Take a message in. `peers` are the other schedulers."""
        self._peers = peers
        match message:
            case AdapterList():
                self._compare(sender, message, now)
            case AdaptersHeld():
                self._greet(sender, is_known=sender in self._held)
                self._held[sender] = message
            case AdaptersUsed():
                self._greet(sender, is_known=sender in self._used)
                self._used[sender] = message
            case LoadAdapter():
                self._load(sender, message, now)
            case UnloadAdapter():
                self._unload(sender, message, now)
        return self._go_on(now)

    def greet(self, peer: str) -> list[Word]:
        """Tell another scheduler, where there is anything to tell."""
        return [(peer, self._list)] if self._list.version.number else []

    def lost(self, address: str, peers: tuple[str, ...], now: float) -> list[Word]:
        """An instance, an ingress or another scheduler can no longer be reached: nobody waits for it."""
        self._peers = peers
        self._held.pop(address, None)
        self._used.pop(address, None)
        return self._go_on(now)

    def tick(self, now: float) -> list[Word]:
        return self._go_on(now)

    def _compare(self, sender: str, theirs: AdapterList, now: float) -> None:
        if theirs.version > self._list.version:
            self._list = theirs
            self._settled_at = now + SETTLE_S
            self._tell_all(but=sender)
        elif theirs.version < self._list.version and sender in self._peers:
            self._out.append((sender, self._list))

    def _greet(self, sender: str, *, is_known: bool) -> None:
        """Tell the list to who says something for the first time, whichever version they have."""
        if not is_known:
            self._out.append((sender, self._list))

    def _load(self, asker: str, asked: LoadAdapter, now: float) -> None:
        name = adapter_name(asked.key)
        known = [each for each in self._list.adapters if adapter_name(each.key) == name]
        same = next((each for each in known if each.key == asked.key), None)
        if why := self._why_not():
            self._refuse(asker, asked.nonce, why, 503)
        elif not self._held:
            self._refuse(asker, asked.nonce, "no instance is there that could load it", 503)
        elif any(each.state == "loading" for each in known) or (same and same.state == "retiring"):
            self._refuse(
                asker, asked.nonce, f"{name!r} is being loaded or unloaded: ask again when that is over", 409
            )
        elif same and asked.in_place:
            self._out.append((asker, AdapterChanged(asked.nonce)))
        elif any(each.state == "serving" for each in known) and not asked.in_place:
            self._refuse(
                asker,
                asked.nonce,
                f"The lora adapter {name!r} has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to true.",
                400,
            )
        else:
            self._write([*self._list.adapters, ListedAdapter(asked.key, asked.folder, "loading")])
            self._begin(asker, asked.nonce, asked.key, self._await_loaded, now)

    def _unload(self, asker: str, asked: UnloadAdapter, now: float) -> None:
        key = next(
            (
                each.key
                for each in self._list.adapters
                if adapter_name(each.key) == asked.name and each.state == "serving"
            ),
            "",
        )
        if why := self._why_not():
            self._refuse(asker, asked.nonce, why, 503)
        elif not key:
            self._refuse(asker, asked.nonce, f"The lora adapter {asked.name!r} cannot be found.", 404)
        else:
            self._write(self._with_state([key], "retiring"))
            self._begin(asker, asked.nonce, key, self._await_retired, now)

    def _why_not(self) -> str:
        return "" if self.leads else _ANOTHER_LEADS

    def _begin(
        self, asker: str, nonce: int, key: str, await_for: Callable[[_Change, float], None], now: float
    ) -> None:
        self._changes.append(
            _Change(
                asker=asker,
                nonce=nonce,
                key=key,
                await_for=await_for,
                version=self._list.version,
                due_at=now + LOAD_S,
            )
        )

    def _refuse(self, asker: str, nonce: int, why: str, status: int) -> None:
        self._out.append((asker, AdapterChanged(nonce, why, status)))

    def _go_on(self, now: float) -> list[Word]:
        before = None
        while before != (self._list.version, len(self._changes)):
            before = self._list.version, len(self._changes)
            for change in self._changes:
                change.await_for(change, now)
                if change.answer is not None:
                    self._out.append((change.asker, change.answer))
            self._changes = [change for change in self._changes if change.answer is None]
            if self.leads:
                self._clear(now)
        out, self._out = self._out, []
        return out

    def _await_loaded(self, change: _Change, now: float) -> None:
        """Wait until every instance has it, or one refuses it."""
        if not self.leads or not any(
            each.key == change.key and each.state == "loading" for each in self._list.adapters
        ):
            # The scheduler that leads takes it off the list, if it has not done so.
            change.answer = AdapterChanged(change.nonce, _ANOTHER_LEADS, 503)
            return
        refusals = [
            f"instance {address}: {why}"
            for address, held in self._held.items()
            for key, why in held.failed
            if key == change.key and held.version >= change.version
        ]
        late = self._late(self._held, change.version)
        if not refusals and late and now >= change.due_at:
            refusals = [f"{', '.join(late)} has not loaded it within {LOAD_S:g} s"]
        change.why = "; ".join(refusals)
        if not change.why and late:
            return
        if change.why:
            self._write(
                [each for each in self._list.adapters if each.key != change.key or each.state != "loading"]
            )
            change.await_for = self._await_dropped
        else:
            old = [
                each.key
                for each in self._list.adapters
                if each.state == "serving" and adapter_name(each.key) == adapter_name(change.key)
            ]
            listed = self._with_state([change.key], "serving")
            self._write([replace(each, state="retiring") if each.key in old else each for each in listed])
            change.await_for = self._await_told
        change.version, change.due_at = self._list.version, now + LOAD_S

    def _await_told(self, change: _Change, now: float) -> None:
        """Wait until every ingress goes by the list."""
        if not self._late(self._used, change.version) or now >= change.due_at:
            change.answer = AdapterChanged(change.nonce)

    def _await_retired(self, change: _Change, now: float) -> None:
        """Wait until no request needs it and it has left the list, however long that takes."""
        if change.key not in {each.key for each in self._list.adapters}:
            change.version, change.due_at = self._list.version, now + LOAD_S
            change.await_for = self._await_dropped

    def _await_dropped(self, change: _Change, now: float) -> None:
        """Wait until every instance has given it up."""
        if not self._late(self._held, change.version) or now >= change.due_at:
            change.answer = AdapterChanged(change.nonce, change.why, 400 if change.why else 200)

    def _clear(self, now: float) -> None:
        """Take from the list what nobody needs any more, and what is loaded for nobody: its scheduler is gone."""
        wanted = {change.key for change in self._changes}
        needed = {key for used in self._used.values() for key in used.in_use}
        all_know = not self._late(self._used, self._list.version) and now >= self._settled_at
        left = [
            each
            for each in self._list.adapters
            if each.state == "serving"
            or (each.state == "loading" and each.key in wanted)
            or (each.state == "retiring" and (not all_know or each.key in needed))
        ]
        if len(left) < len(self._list.adapters):
            self._write(left)

    def _late(
        self, said: dict[str, AdaptersHeld] | dict[str, AdaptersUsed], version: ListVersion
    ) -> list[str]:
        return [address for address, word in said.items() if word.version < version]

    def _with_state(self, keys: list[str], state: str) -> list[ListedAdapter]:
        return [
            replace(each, state=state) if each.key in keys else each  # type: ignore[arg-type]
            for each in self._list.adapters
        ]

    def _write(self, adapters: Iterable[ListedAdapter]) -> None:
        version = ListVersion(self._list.version.number + 1, self._me)
        self._list = AdapterList(version, tuple(adapters))
        self._tell_all()

    def _tell_all(self, but: str = "") -> None:
        self._out += [
            (address, self._list) for address in (*self._held, *self._used, *self._peers) if address != but
        ]
