"""The compute thread waits for room in the queue of writes, but for no write that stalls."""

import asyncio

from core.messages import PrefillFailed
from kvtransfer.pusher import Pusher
from kvtransfer.queue_room import QueueRoom
from tests.kvtransfer.test_pusher import BLOCKS, FakeMail, Gate, grant_of, shard, works
from tests.patience import until


async def test_a_write_that_stalls_is_given_up_and_computing_goes_on() -> None:
    gate, mail = Gate(), FakeMail()
    pusher = Pusher(shard(), BLOCKS, mail, [gate], room=QueueRoom(1, stall_s=0.05))
    failed = list[str]()

    def on_failed(grant_id: str, why: str) -> None:
        failed.append(why)
        pusher.stop(grant_id, reason=why)

    pusher.open(grant_of("g", shard(), 1), lambda _: None, lambda _: None, on_failed)
    done = pusher.step_started(works(grant_of("g", shard(), 1), (1,), 0, 4))
    await asyncio.to_thread(done, 0, 0)
    computing = asyncio.create_task(asyncio.to_thread(done, 0, 1))
    await until(lambda: bool(failed))
    assert failed == ["a write to decode has not ended for 0.05 s"]
    assert not computing.done(), "the write still reads the blocks"
    gate.open.release()
    await computing
    await until(lambda: not pusher.num_open)
    assert len(gate.order) == 1
    assert mail.sent == [PrefillFailed("g", failed[0])]
    await pusher.close()
