"""Whether a model serves, sleeps or cannot be had, as lists of models say it."""

import asyncio
from typing import Final

from cluster.ingress.delivery.generator import Generator
from core.errors import ReplicaLost

WAIT_S: Final = 0.5
"""How long a list of models waits for what a model's scheduler says."""


async def state_of(generator: Generator) -> str:
    """Return `serving` where a request would be answered now, `asleep` where it would wake the model, else `unavailable`."""
    try:
        async with asyncio.timeout(WAIT_S):
            ready, _ = await generator.ready()
            sleeps = ready and await generator.model_sleep.is_sleeping()
    except (TimeoutError, ReplicaLost):
        return "unavailable"
    return "asleep" if sleeps else "serving" if ready else "unavailable"
