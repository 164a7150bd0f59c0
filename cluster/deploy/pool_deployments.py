"""The deployments that hold instances: a replica is one instance and dies with its worker."""

import asyncio
import contextlib
import os
from dataclasses import replace
from functools import partial
from typing import Any

import ray
import ray.util
from ray import serve

from cluster.deploy.kube.topology import read_site
from cluster.deploy.process_logs import configure_logging
from cluster.deploy.rank_actors import rank_actors
from cluster.instance.instance import Instance, Role
from cluster.instance.real_parts import remote_parts
from core.clock import WallClock
from core.config import ClusterConfig
from core.errors import ReplicaLost
from core.garbage import leave_out_all_there_is
from core.ports import Resolve
from models.hub import resolve
from net.mail import TcpMail


def scheduler_resolver(scheduler: Any) -> Resolve:
    """Asks the Scheduler deployment where its replicas listen now; of those that do not answer, nothing is said."""

    async def resolve() -> list[str]:
        asked = scheduler.broadcast("endpoint")
        answers: list[Any] = await asked.results_async(timeout_s=10, return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, str)]

    return resolve


def mail_host(one_host: bool) -> str:
    """Where this process listens for its peers: on loopback as long as they are all on this host."""
    return "127.0.0.1" if one_host else ray.util.get_node_ip_address()


class _Pool:
    """One instance per replica. Serve's health check kills and replaces a replica whose instance has failed.

    A replica that Serve takes away drains first: its sequences move to other instances while they decode."""

    role: Role

    async def __init__(self, config: ClusterConfig, key: bytes, scheduler: Any, one_host: bool) -> None:
        configure_logging(config.serve.log_level, config.serve.log_format)
        self._drain_timeout_s = config.serve.drain_timeout_s
        mail = TcpMail(key, mail_host(one_host), config=config.mail)
        role = self._role = "both" if config.any_role else self.role
        folder, place = (
            resolve(config.model.path),
            partial(rank_actors, config, role, key, mail_host(one_host)),
        )
        parts = await asyncio.to_thread(remote_parts, config, folder, role, mail, key, place)
        parts = replace(parts, site=await asyncio.to_thread(read_site, os.environ))
        self._instance = Instance(config, role, mail, WallClock(), scheduler_resolver(scheduler), parts)
        leave_out_all_there_is()
        self._instance.run()

    async def check_health(self) -> None:
        if self._instance.failure is not None:
            raise ReplicaLost(f"this {self._role} instance has stopped: {self._instance.failure}")

    async def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the constructor failed
            await self._instance.drain(self._drain_timeout_s)
            await self._instance.close()


@serve.deployment
class PrefillPool(_Pool):
    role = "prefill"


@serve.deployment
class DecodePool(_Pool):
    role = "decode"
