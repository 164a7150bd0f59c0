"""An ingress whose client counts what its answers say, and that is killed: `python usage_process.py URL FOLDER NUM SEED`.

It writes what its client has counted, and ends by SIGKILL."""

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

from cluster.ingress.tenants import ledger
from cluster.store.sql_store import SqlStore
from tests.cluster.ingress.api.fakes import FakeGenerator
from tests.cluster.ingress.api.harness import CHAT, CHATS, COMPLETIONS, OK, SETTINGS, Api
from tests.cluster.store.usage_count import count


async def main(url: str, folder: str, num: int, seed: int) -> None:
    ledger.FLUSH_S = 0.02
    settings = replace(SETTINGS, usage_folder=Path(folder))
    api, chance, counted = (
        Api(FakeGenerator("hello"), settings, store=SqlStore(lambda: url, 60.0)),
        random.Random(seed),
        Counter[str](),
    )
    for _ in range(num):
        stream = chance.random() < 0.5
        path, body = chance.choice([(CHATS, CHAT), (COMPLETIONS, {**OK, "n": 2, "max_tokens": 3})])
        more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        count(counted, await api.post(path, body | more))
    os.write(1, json.dumps(counted).encode())
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
