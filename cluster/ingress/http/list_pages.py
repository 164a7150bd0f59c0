"""Pages of OpenAI's lists: of files, batches and a response's items."""

from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from core.errors import RequestError

_MAX_PAGE = 10_000


def page_of(http: HttpRequest, items: list[dict[str, Any]]) -> Response:
    """Return the page that the query asks for (`after`, `limit`, `order`). `items` have the newest first. Raises RequestError."""
    after, wanted = http.query_params.get("after"), http.query_params.get("limit", "20")
    if not wanted.isdecimal() or not 1 <= int(wanted[:9]) <= _MAX_PAGE:
        raise RequestError(f"limit must be between 1 and {_MAX_PAGE}, not {wanted!r}", field="limit")
    order = http.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError(f"order must be asc or desc, not {order!r}", field="order")
    if order == "asc":
        items = items[::-1]
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise RequestError(f"there is no {after!r} to go on after", field="after")
        items = items[ids.index(after) + 1 :]
    shown = items[: int(wanted)]
    ends = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
    return JSONResponse({"object": "list", "data": shown, **ends, "has_more": len(items) > len(shown)})
