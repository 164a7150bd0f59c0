"""Arrivals from trace rows: prompts that share exactly the blocks that the trace says they share.

A trace is scaled up by superposing copies of itself, shifted in time and with prefixes of their own. Invariant: two prompts
begin with the same tokens only where they have the same leading prefix ids and belong to the same copy, and, where clients are
tenants (`named`), to the same client."""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Protocol

from sim.simulated_run import Arrival

_DIGIT = 30_000
"""Below sim.simulated_run.VOCAB_SIZE; a block's number is written in two such digits."""


class Row(Protocol):
    """One request of a trace (baton.bench.traces.TraceRow)."""

    @property
    def arrival_at(self) -> float: ...
    @property
    def input_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def prefix_ids(self) -> tuple[int, ...]: ...
    @property
    def prefix_block_tokens(self) -> int: ...
    @property
    def client(self) -> str: ...


def arrivals(
    rows: Sequence[Row], span_s: float, copies: int = 1, seed: int = 0, *, named: bool = False
) -> list[Arrival]:
    """Return the requests of the first `span_s` seconds, in order of arrival. Copy i is turned by i/copies of that span.
    `named`: each request's tenant is the trace's client.

    Rows without tokens to compute or to generate get one of each."""
    numbers: Iterator[int] = count(1)
    known: dict[tuple[int, str, int], int] = {}
    chosen = [row for row in rows if row.arrival_at < span_s]
    timed: list[tuple[float, tuple[int, ...], int, str]] = []
    for copy in range(copies):
        for row in chosen:
            client = row.client if named else ""
            keys = [known.setdefault((copy, client, id_), len(known) * 2) for id_ in row.prefix_ids]
            at = (row.arrival_at + copy * span_s / copies) % span_s
            prompt = prompt_of(keys, row.prefix_block_tokens, row.input_tokens, 2 * next(numbers) + 1)
            timed.append((at, prompt, max(1, row.output_tokens), client))
    timed.sort(key=lambda item: item[0])
    return [
        Arrival(at, prompt, output, seed + i, tenant=client)
        for i, (at, prompt, output, client) in enumerate(timed)
    ]


def prompt_of(keys: Sequence[int], block_tokens: int, num_tokens: int, own: int) -> tuple[int, ...]:
    """Return a prompt's tokens. Shared blocks have even numbers (`keys`), a request's own text an odd one (`own`)."""
    wanted = max(1, num_tokens)
    tokens: list[int] = []
    for key in keys:
        tokens += _block(key, block_tokens)
    if len(tokens) < wanted:
        tokens += _block(own, wanted - len(tokens))
    return tuple(tokens[:wanted])


def _block(number: int, num_tokens: int) -> list[int]:
    pair = [1 + number % _DIGIT, 1 + number // _DIGIT % _DIGIT]
    return (pair * (num_tokens // 2 + 1))[:num_tokens]
