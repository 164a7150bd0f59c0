"""What happens to instances between one look at `/cluster` and the next, in the words of a Kubernetes event."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Notice:
    kind: Literal["Normal", "Warning"]
    reason: str
    message: str


class Instances:
    """What was seen last. An instance is gone when it is missing twice, since a scheduler that has just started knows no instance
    yet."""

    def __init__(self, model: str = "") -> None:
        """`model`: named in messages, where instances of several are watched."""
        self._of_model = f" of {model}" if model else ""
        self._known: dict[str, Mapping[str, Any]] = {}
        self._missing: set[str] = set()

    def look(
        self, instances: Sequence[Mapping[str, Any]], sleepers: Sequence[Mapping[str, Any]] = ()
    ) -> Iterator[Notice]:
        """Return the events since the last look. Both are as /cluster gives them; an instance that sleeps is not lost."""
        present = {one["address"]: one for one in instances}
        for address, one in present.items():
            yield from _changed(self._name(one), one, self._known.get(address, {}))
        there = present.keys() | {one["address"] for one in sleepers}
        for address in [address for address in self._known if address not in there]:
            if address in self._missing:
                gone = self._known.pop(address)
                yield _gone(self._name(gone), gone)
        self._known |= present
        self._missing = self._known.keys() - there

    def _name(self, one: Mapping[str, Any]) -> str:
        roles = [role for role, has in (("prefill", one["prefills"]), ("decode", one["decodes"])) if has]
        return f"{' and '.join(roles)} instance {one['address']}{self._of_model}"


def _changed(name: str, one: Mapping[str, Any], earlier: Mapping[str, Any]) -> Iterator[Notice]:
    if not earlier:
        yield Notice("Normal", "InstanceJoined", f"{name} takes requests")
    if one["leaving"] and not earlier.get("leaving", False):
        yield Notice("Normal", "InstanceDraining", f"{name} leaves: what runs there moves")
    if one["defect"] and one["defect"] != earlier.get("defect", ""):
        yield Notice("Warning", "InstanceDefect", f"{name}: {one['defect']}")


def _gone(name: str, one: Mapping[str, Any]) -> Notice:
    if one["leaving"]:
        return Notice("Normal", "InstanceDrained", f"{name} has left")
    lost = f"{name} was lost: its peers fence it off from their KV, and its requests go on elsewhere"
    return Notice("Warning", "InstanceFenced", lost)
