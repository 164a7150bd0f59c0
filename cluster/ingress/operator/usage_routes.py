"""What was used, as OpenAI's API of organisations has it; tenants are its projects, service classes its tiers."""

import csv
import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from cluster.ingress.http.http_route import HttpRoute
from cluster.ingress.tenants.access import KeyHolder
from cluster.ingress.tenants.api_keys import Scope
from cluster.store.usage_port import (
    DAY_S,
    HOUR_S,
    MINUTE_S,
    Dimension,
    UsageCounts,
    UsageQuery,
    UsageResult,
    UsageStore,
)
from core.errors import RequestError

_WIDTHS = {"1m": (MINUTE_S, 60, 1440), "1h": (HOUR_S, 24, 168), "1d": (DAY_S, 7, 31)}
"""Seconds of a bucket, how many there are on a page, and how many there may be."""
_DIMENSIONS: dict[str, Dimension] = {
    "project_id": "tenant", "api_key_id": "key_id", "model": "model", "service_tier": "slo_class", "batch": "batch",
}  # fmt: skip
_FILTERS: dict[str, Dimension] = {"project_ids": "tenant", "api_key_ids": "key_id", "models": "model"}
_KNOWN = {"start_time", "end_time", "bucket_width", "group_by", "limit", "page", "batch", *_FILTERS}
_MOST_CSV_BUCKETS = 50_400
"""35 days of minutes."""


@dataclass(frozen=True, slots=True)
class _Asked:
    begin: int
    end: int
    width_s: int
    num_buckets: int
    group_by: tuple[str, ...]
    only: Mapping[Dimension, Sequence[str | bool]]

    @property
    def first(self) -> int:
        return self.begin - self.begin % self.width_s

    def query(self, num_buckets: int) -> UsageQuery:
        end = min(self.end, self.first + num_buckets * self.width_s)
        group_by: tuple[Dimension, ...] = tuple(_DIMENSIONS[name] for name in self.group_by)
        return UsageQuery(self.first, end, self.width_s, group_by, self.only)


class UsageRoutes:
    def __init__(self, store: UsageStore) -> None:
        self._store = store

    def routes(self) -> list[HttpRoute]:
        return [
            HttpRoute("GET", "/v1/organization/usage/completions", self.of_all, scope=Scope.METRICS),
            HttpRoute("GET", "/v1/usage", self.own),
        ]

    async def of_all(self, http: HttpRequest) -> Response:
        """Return everybody's usage. Raises RequestError and StoreUnavailable."""
        return await self._answer(http, {})

    async def own(self, http: HttpRequest) -> Response:
        """Return the usage of the tenant that asks, or of its key where it has no tenant."""
        holder: KeyHolder = http.state.holder
        only: dict[Dimension, Sequence[str | bool]] = {"tenant": [holder.tenant.name]}
        if not holder.tenant.name:
            only["key_id"] = [holder.key_id]
        return await self._answer(http, only)

    async def _answer(self, http: HttpRequest, only: Mapping[Dimension, Sequence[str | bool]]) -> Response:
        asked = _read(http, only)
        if "text/csv" in http.headers.get("accept", ""):
            if asked.end - asked.first > _MOST_CSV_BUCKETS * asked.width_s:
                raise RequestError(f"a table has at most {_MOST_CSV_BUCKETS} buckets", field="start_time")
            found = await self._store.usage(asked.query(_MOST_CSV_BUCKETS))
            return Response(_table(asked, found), media_type="text/csv")
        return JSONResponse(_page(asked, await self._store.usage(asked.query(asked.num_buckets))))


def _page(asked: _Asked, found: Sequence[UsageResult]) -> dict[str, Any]:
    by_start: dict[int, list[dict[str, Any]]] = {}
    for result in found:
        by_start.setdefault(result.start, []).append(_result(asked, result))
    query = asked.query(asked.num_buckets)
    buckets = [
        {
            "object": "bucket",
            "start_time": start,
            "end_time": start + asked.width_s,
            "results": by_start.get(start, []),
        }
        for start in range(query.begin, query.end, asked.width_s)
    ]
    has_more = query.end < asked.end
    return {
        "object": "page",
        "data": buckets,
        "has_more": has_more,
        "next_page": f"page_{query.end}" if has_more else None,
    }


def _result(asked: _Asked, result: UsageResult) -> dict[str, Any]:
    by = {
        name: result.by[dimension] if name in asked.group_by else None
        for name, dimension in _DIMENSIONS.items()
    }
    return {
        "object": "organization.usage.completions.result",
        **_counts(result.counts),
        **by,
        "user_id": None,
    }


def _counts(counts: UsageCounts) -> dict[str, Any]:
    return {
        "num_model_requests": counts.num_requests,
        "input_tokens": counts.prompt_tokens,
        "input_cached_tokens": counts.cached_tokens,
        "output_tokens": counts.output_tokens,
        "output_reasoning_tokens": counts.reasoning_tokens,
        "num_images": counts.images,
        "sequence_seconds": round(counts.sequence_s, 3),
        "input_audio_tokens": 0,
        "output_audio_tokens": 0,
    }


def _table(asked: _Asked, found: Sequence[UsageResult]) -> str:
    text = io.StringIO()
    counts = list(_counts(UsageCounts()))[:-2]
    writer = csv.DictWriter(text, ["start_time", "end_time", *asked.group_by, *counts], extrasaction="ignore")
    writer.writeheader()
    for result in found:
        times = {"start_time": result.start, "end_time": result.start + asked.width_s}
        writer.writerow(times | _result(asked, result))
    return text.getvalue()


def _read(http: HttpRequest, only: Mapping[Dimension, Sequence[str | bool]]) -> _Asked:
    """Read the query. Lists are repeated parameters, with [] behind their name or without. Raises RequestError."""
    given: dict[str, list[str]] = {}
    for name, value in http.query_params.multi_items():
        given.setdefault(name.removesuffix("[]"), []).append(value)
    if unknown := sorted(given.keys() - _KNOWN):
        raise RequestError(
            f"{unknown[0]} is not known here; there are {', '.join(sorted(_KNOWN))}", field=unknown[0]
        )
    width = given.get("bucket_width", ["1d"])[-1]
    if width not in _WIDTHS:
        raise RequestError(
            f"bucket_width must be one of {', '.join(_WIDTHS)}, not {width!r}", field="bucket_width"
        )
    width_s, usual, most = _WIDTHS[width]
    group_by = tuple(dict.fromkeys(given.get("group_by", ())))
    if wrong := [name for name in group_by if name not in _DIMENSIONS]:
        raise RequestError(
            f"group_by must be among {', '.join(_DIMENSIONS)}, not {wrong[0]!r}", field="group_by"
        )
    begin, end = _number(given, "start_time"), _number(given, "end_time", int(time.time()) + 1)
    if "page" in given:
        begin = _number({"page": [given["page"][-1].removeprefix("page_")]}, "page")
    limit = _number(given, "limit", usual)
    if not 1 <= limit <= most:
        raise RequestError(
            f"limit must be between 1 and {most} for buckets of {width}, not {limit}", field="limit"
        )
    return _Asked(begin, max(begin, end), width_s, limit, group_by, _only(given, only))


def _only(
    given: Mapping[str, list[str]], only: Mapping[Dimension, Sequence[str | bool]]
) -> Mapping[Dimension, Sequence[str | bool]]:
    """Return which usage is wanted of that which may be seen."""
    wanted = dict(only)
    for name, dimension in _FILTERS.items():
        if name in given:
            seen = only.get(dimension)
            wanted[dimension] = [value for value in given[name] if seen is None or value in seen]
    if "batch" in given:
        wanted["batch"] = [given["batch"][-1] == "true"]
    return wanted


def _number(given: Mapping[str, list[str]], name: str, default: int | None = None) -> int:
    text = given.get(name, [""])[-1]
    if not text and default is not None:
        return default
    if not text.isascii() or not text.isdecimal() or len(text) > 12:
        raise RequestError(f"{name} must be a whole number, not {text!r}", field=name)
    return int(text)
