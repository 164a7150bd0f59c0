"""What a reasoning effort means to the served model: its chat template's own word for the nearest effort that it knows."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.ingress.delivery.generator import ChatTokenizer
from core.errors import RequestError

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""All that any client sends, the weakest first."""
_OPENAIS = ("low", "medium", "high")
"""What gpt-oss and its like know: their templates name none of them but the default."""
_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates switch reasoning on and off."""
_NAMED = re.compile(rf"""['"]({"|".join(EFFORTS)})['"]""")


@dataclass(frozen=True, slots=True)
class TakenEffort:
    """An effort as the template takes it."""

    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    taken: str = ""
    """Its own effort. Empty where it knows none, and the model goes its own way."""
    note: str = ""
    """Says to the client that this is not what it asked for."""


class ReasoningEfforts:
    def __init__(self, tokenizer: ChatTokenizer, *, reasons: bool) -> None:
        """`reasons`: the model's answers have reasoning."""
        self._tokenizer, self._reasons = tokenizer, reasons
        self._known = self._found()

    def of(self, effort: str) -> TakenEffort:
        """Return what a client's effort means."""
        if not self._known:
            if effort == ("medium" if self._reasons else "none"):
                return TakenEffort()
            return TakenEffort(
                note=f"reasoning effort {effort!r}: changes nothing, since this model knows none"
            )
        taken = min(self._known, key=lambda known: _distance(effort, known))
        note = (
            ""
            if taken == effort
            else f"reasoning effort {effort!r}: taken as {taken!r}, the nearest that this model knows"
        )
        return TakenEffort(self._known[taken], taken, note)

    def _found(self) -> dict[str, Mapping[str, Any]]:
        """Return the template's arguments for each effort that it knows."""
        named = self._named()
        if (switch := next(filter(self._switches, _SWITCHES), None)) is None:
            return named
        return {"none": {switch: False}, **(named or {"medium": {switch: True}})}

    def _named(self) -> dict[str, Mapping[str, Any]]:
        template = self._tokenizer.template
        if "reasoning_effort" not in template:
            return {}
        written = set(_NAMED.findall(template))
        names = [name for name in EFFORTS if name in written] if len(written) > 1 else _OPENAIS
        return {name: {"reasoning_effort": name} for name in names if self._renders(reasoning_effort=name)}

    def _switches(self, name: str) -> bool:
        """Return whether the variable is a switch. `thinking` may also be the name of a message's field."""
        if name == "enable_thinking" or name not in self._tokenizer.template:
            return name in self._tokenizer.template
        on, off = self._rendered(**{name: True}), self._rendered(**{name: False})
        return on is not None and off is not None and on != off

    def _renders(self, **arguments: Any) -> bool:
        return self._rendered(**arguments) is not None

    def _rendered(self, **arguments: Any) -> str | None:
        try:
            return self._tokenizer.render_chat([{"role": "user", "content": "x"}], **arguments)
        except RequestError:
            return None


def _distance(wanted: str, known: str) -> tuple[bool, int, int]:
    """Order efforts by how near they are. Only `none` and `minimal` are ever taken for no reasoning; of two the stronger wins."""
    gap = EFFORTS.index(known) - EFFORTS.index(wanted)
    return known == "none" and wanted not in ("none", "minimal"), abs(gap), -gap
