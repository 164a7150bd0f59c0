"""One rank of a measurement over nodes: what it is told, and how its process is run.

A rank is `python -m cluster.preflight.collective_rank` or `kv_rank`. It reads its RankJob as JSON from standard input, and the
last line of its standard output is what it has measured, as JSON."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from cluster.preflight.child_processes import started, told
from core.config.cluster_config import TransferConfig
from core.config.security_config import SecurityConfig
from core.errors import ConfigError

_ROOT = Path(__file__).parents[2]
_START_S = 60.0
_MEASURE_S = 60.0
_LINK_S = 5.0
"""The longest time that a link may take for each 64 MiB of a message: links are measured one after the other."""

Kind = Literal["collective_rank", "kv_rank"]
"""The module that measures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    kind: Kind
    rank: int
    world: int
    meeting: str
    """host:port, where rank 0 listens for the others."""
    mib: int
    """The size of a message."""
    backend: Literal["nccl", "gloo"]
    host: str = ""
    """Where the others reach this rank. Its node knows."""
    card: int = 0
    """The number of the GPU that it uses, if there are any. Where there are fewer ranks share one."""
    key: str = ""
    """The secret that all ranks share, in hexadecimal digits."""
    transfer: TransferConfig = field(default_factory=TransferConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)

    @property
    def deadline_s(self) -> float:
        num_links = self.world * (self.world - 1)
        return _START_S + _MEASURE_S + num_links * _LINK_S * max(1, self.mib / 64)

    def as_json(self) -> str:
        sections = {"transfer": self.transfer.model_dump(), "security": self.security.model_dump()}
        return json.dumps(asdict(self) | sections)

    @classmethod
    def from_json(cls, text: str) -> "RankJob":
        """Raises ConfigError where there is no such measurement."""
        fields = json.loads(text)
        if fields["kind"] not in get_args(Kind):
            raise ConfigError(f"there is no measurement {fields['kind']}")
        transfer, security = TransferConfig(**fields["transfer"]), SecurityConfig(**fields["security"])
        return cls(**fields | {"transfer": transfer, "security": security})


def read_job() -> RankJob:
    return RankJob.from_json(sys.stdin.read())


def store_at(address: str, rank: int, world: int, wait_s: float) -> TCPStore:
    """Return the store of all ranks. Rank 0 has it, and listens at `address`; the others may come as late as `wait_s`."""
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), world, is_master=rank == 0, timeout=timedelta(seconds=wait_s))


def meet(job: RankJob) -> TCPStore:
    """Return the store of all ranks, once each of them is there."""
    store = store_at(job.meeting, job.rank, job.world, _START_S)
    store.set_timeout(timedelta(seconds=job.deadline_s))
    return store


def another_connection(store: Any) -> TCPStore:
    """Return the same store for another thread: who waits for a key keeps all others of a connection waiting."""
    return store.clone()


def exchange(store: TCPStore, job: RankJob, name: str, mine: str) -> list[str]:
    """Return what each rank says."""
    store.set(f"{name}/{job.rank}", mine)
    return [store.get(f"{name}/{rank}").decode() for rank in range(job.world)]


async def run_rank_here(job: RankJob, host: str) -> dict[str, Any]:
    """Run a rank on this node, which the others reach at `host`. Raises ConfigError when it fails, or is not done in time; its
    process is gone then."""
    command = [sys.executable, "-m", f"cluster.preflight.{job.kind}"]
    env, question = os.environ | {"OMP_NUM_THREADS": "1"}, replace(job, host=host).as_json().encode()
    try:
        async with asyncio.timeout(job.deadline_s), started(command, PIPE, cwd=_ROOT, env=env) as process:
            ended = await told(process, question)
    except TimeoutError:
        raise ConfigError(f"rank {job.rank} was not done after {job.deadline_s:g} s") from None
    if ended.status:
        raise ConfigError(f"rank {job.rank} failed: {ended.last_words}")
    return json.loads(ended.out.splitlines()[-1])
