"""Small random traces with shared prefixes, for the tests of both simulations."""

import random

from baton.bench.traces import TraceRow

BLOCK = 16


def random_rows(seed: int, count: int, rate: float) -> list[TraceRow]:
    """Half of the requests go on where an earlier one's shared text ended."""
    rng = random.Random(seed)
    chains: list[tuple[int, ...]] = [()]
    rows: list[TraceRow] = []
    at = 0.0
    for number in range(count):
        at += rng.expovariate(rate)
        base = rng.choice(chains) if rng.random() < 0.5 else ()
        ids = base + tuple(1000 * number + i for i in range(rng.randint(0, 20)))
        chains.append(ids)
        num_input = len(ids) * BLOCK + rng.randint(1, 300)
        rows.append(
            TraceRow(
                arrival_at=at,
                input_tokens=num_input,
                output_tokens=rng.randint(1, 120),
                prefix_ids=ids,
                prefix_block_tokens=BLOCK,
            )
        )
    return rows
