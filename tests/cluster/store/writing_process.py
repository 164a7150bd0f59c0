"""A process that counts in a shared record, and stores lines under a claim: `python writing_process.py URL NAME NUM`."""

import asyncio
import sys
from dataclasses import replace

from cluster.store.sql_store import SqlStore
from cluster.store.store_port import Bound, Held, LeaseLost, StoreRecord


async def count(store: SqlStore, num: int) -> None:
    while num:
        found = await store.get("counter")
        assert found is not None
        if await store.replace(replace(found, body=str(int(found.body) + 1).encode())):
            num -= 1


async def write_lines(store: SqlStore, name: str, num: int) -> None:
    """Claim the file again and again, each time for so short that another process takes it over in the midst."""
    while num:
        if (claimed := await store.claim("file", name, 0.002)) is None:
            await asyncio.sleep(0.001)
            continue
        at = int(claimed.body)
        line = StoreRecord(id=f"file/{at}", kind="line", parent="file", position=at, body=name.encode())
        try:
            await store.put([replace(claimed, body=str(at + 1).encode()), line], held=Held("file", name))
            num -= 1
        except LeaseLost:
            continue


async def main(url: str, name: str, num: int) -> None:
    store = SqlStore(lambda: url, timeout_s=60.0)
    bound = Bound(kind="note", owner="a", num_bytes=50, makes_room=True)
    notes = [StoreRecord(id=f"{name}.{n}", kind="note", owner="a", num_bytes=10) for n in range(num)]
    await asyncio.gather(
        count(store, num), write_lines(store, name, num), *(store.put([note], bound=bound) for note in notes)
    )
    store.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
