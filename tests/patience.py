"""How long a test waits for what must come."""

import asyncio
from collections.abc import Callable

PATIENCE_S = 60.0
"""A test that passes never waits this long on an idle machine. Beside other work a process takes seconds to start."""


async def until(done: Callable[[], bool]) -> None:
    """Wait for something of this event loop or of its threads. Raises TimeoutError where it has not come, however long the loop
    itself stood still meanwhile."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not done():
                await asyncio.sleep(0.002)
    except TimeoutError:
        if not done():
            raise
