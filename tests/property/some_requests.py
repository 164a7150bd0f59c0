"""Requests at random: that share prefixes, are siblings, and say what becomes of their KV."""

import random
from math import inf

from core.types import CacheHints, Request, SamplingParams


def some_requests(rng: random.Random, capacity: int) -> list[Request]:
    """Requests that share prefixes, and siblings that have a prompt in common, of at most half of `capacity` tokens."""
    prefixes = [[rng.randrange(4) for _ in range(rng.randint(1, capacity // 3))] for _ in range(3)]
    requests: list[Request] = []
    for i in range(rng.randint(1, 12)):
        prompt = (prefixes[rng.randrange(3)] + [rng.randrange(4) for _ in range(rng.randint(1, 6))])[
            : capacity // 2
        ]
        salt, sibling = rng.choice(("", "t")), ""
        if requests and rng.random() < 0.5:
            other = rng.choice(requests)
            prompt = [*other.prompt, *(rng.randrange(4) for _ in range(rng.randrange(2)))][: capacity // 2]
            salt, sibling = other.salt, other.key
        sampling = SamplingParams(
            max_tokens=rng.randint(1, max(1, capacity - len(prompt) - 1)),
            min_tokens=rng.choice((0, 3)),
            stop_token_ids=tuple(rng.sample(range(50), 2)),
        )
        requests.append(
            Request(
                id=f"r{i}",
                prompt=tuple(prompt),
                sampling=sampling,
                reply_to="f",
                salt=salt,
                sibling=sibling,
                tenant=salt,
                hints=some_hints(random.Random(i)),
            )
        )
    return requests


def some_hints(rng: random.Random) -> CacheHints:
    """Hints of a session with several turns, some of which run at once."""
    return CacheHints(
        session=rng.choice(("", "a", "b")),
        ttl_s=rng.choice((0.0, 0.1, inf)),
        prefetch_s=rng.choice((None, 0.0, 0.05)),
    )
