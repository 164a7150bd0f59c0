"""The instance that a pool's replica holds. Only replicas of pools import this, for it brings torch with it."""

import asyncio
import os
from dataclasses import replace
from functools import partial
from typing import Any

from cluster.deploy.addresses import mail_host, scheduler_resolver
from cluster.deploy.kube.topology import read_site
from cluster.deploy.rank_actors import rank_actors
from cluster.instance.instance import Instance
from cluster.instance.instance_parts import Role
from cluster.instance.real_parts import remote_parts
from core.clock import WallClock
from core.config import ClusterConfig
from core.start_timer import StartTimer
from models.hub import resolve
from net.mail import TcpMail


async def make_instance(
    config: ClusterConfig, key: bytes, role: Role, scheduler: Any, one_host: bool, *, timer: StartTimer
) -> Instance:
    """Make the instance. Returns when the model is loaded and all ranks are there. `timer` has timed the imports. Raises
    ConfigError and ReplicaLost."""
    host = mail_host(one_host)
    mail = TcpMail(key, host, config=config.mail)
    timer.begin("files")
    folder, place = resolve(config.model.path), partial(rank_actors, config, role, key, host)
    parts = await asyncio.to_thread(remote_parts, config, folder, role, mail, key, place, timer=timer)
    parts = replace(parts, site=await asyncio.to_thread(read_site, os.environ))
    return Instance(config, role, mail, WallClock(), scheduler_resolver(scheduler), parts)
