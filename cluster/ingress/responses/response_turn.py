"""A request for a response with the conversation that it goes on from, and the record from which any ingress makes it again."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.ingress.bodies.body_model import validate
from cluster.ingress.responses.responses_items import InputItem, ItemReference, PlacedItem, items_of
from cluster.ingress.responses.responses_requests import ResponsesRequest

Json = dict[str, Any]
MAX_RECORD_BYTES = 256 << 10
"""A longer record is not kept by instances: such an answer is continued by the request itself, sent again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTurn:
    body: ResponsesRequest
    before: tuple[Json, ...]
    """The items that it goes on from."""
    own: tuple[Json, ...]
    """The items of the request itself."""
    items: list[PlacedItem]
    """All of them, validated."""
    slo_class: str | None
    """The class that the client's header names."""

    @property
    def record(self) -> Json:
        body = self.body.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return {"body": body, "before": self.before, "own": self.own, "slo_class": self.slo_class}

    def encoded(self) -> bytes:
        """Return the record for an instance; empty where it is too long for that."""
        record = json.dumps(self.record).encode()
        return record if len(record) <= MAX_RECORD_BYTES else b""


def turn_of(record: Json) -> ResponseTurn:
    """Return the turn of a record."""
    before, own = tuple(record["before"]), tuple(record["own"])
    return ResponseTurn(
        body=validate(ResponsesRequest, record["body"]),
        before=before,
        own=own,
        items=[PlacedItem(item, "input") for item in items_of([*before, *own])],
        slo_class=record["slo_class"],
    )


def new_turn(
    body: ResponsesRequest,
    before: tuple[Json, ...],
    field: str,
    given: Sequence[InputItem],
    stored: Mapping[str, Json],
    slo_class: str | None,
) -> ResponseTurn:
    """Return the turn of a body that has these items, of which `stored` has those that are named. `field` is where the body says
    what it goes on from. Raises RequestError."""
    items = [PlacedItem(item, field) for item in items_of(before)]
    own: list[Json] = []
    is_text = isinstance(body.input, str)
    for at, item in enumerate(given):
        if isinstance(item, ItemReference):
            own.append(stored[item.id])
            (item,) = items_of(own[-1:])
        else:
            own.append(item.model_dump(exclude_none=True))
        items.append(PlacedItem(item, "input" if is_text else f"input[{at}]"))
    return ResponseTurn(body=body, before=before, own=tuple(own), items=items, slo_class=slo_class)
