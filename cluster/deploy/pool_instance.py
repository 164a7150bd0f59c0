"""The instance that a pool's replica holds. Only replicas of pools import this, for it brings torch with it."""

import asyncio
import os
from dataclasses import replace
from functools import partial
from typing import Any

from cluster.deploy.addresses import mail_host, scheduler_resolver
from cluster.deploy.kube.topology import read_site
from cluster.deploy.rank_actors import rank_actors
from cluster.instance.instance_parts import Role
from cluster.instance.openmp_files import remove_openmp_files
from cluster.instance.real_parts import remote_parts
from cluster.instance.resident_instance import ResidentInstance
from core.clock import WallClock
from core.config.cluster_config import ClusterConfig
from core.config.device_transport import check_device_transport
from core.start_timer import StartTimer
from engine.sizing.devices import choose_device
from models.files.hub import resolve
from net.mail import TcpMail
from net.tls import tls_of

INSTANCES = "BATON_KUBE_INSTANCES"
"""How many instances a pod of the chart has. They alone share its memory and processors."""


async def make_instance(
    config: ClusterConfig, key: bytes, role: Role, scheduler: Any, *, one_host: bool, timer: StartTimer
) -> ResidentInstance:
    """Make the instance. Returns when the model is loaded and all ranks are there. `timer` has timed the imports. Raises
    ConfigError and ReplicaLost."""
    _check_device(config, role)
    remove_openmp_files()
    host = mail_host(one_host=one_host)
    mail = TcpMail(key, host, config=config.mail, tls=tls_of(config.security, key))
    timer.begin("files")
    folder, place = resolve(config.model.path), partial(rank_actors, config, role, key, host)
    num_instances = int(os.environ.get(INSTANCES, "0"))
    parts = await asyncio.to_thread(
        remote_parts, config, folder, role, mail, key, place, timer=timer, num_instances=num_instances
    )
    parts = replace(parts, site=await asyncio.to_thread(read_site, os.environ))
    return ResidentInstance(
        config,
        role,
        mail,
        WallClock(),
        scheduler_resolver(scheduler),
        parts,
        num_spare_schedulers=config.serve.num_spare_schedulers,
    )


def _check_device(config: ClusterConfig, role: Role) -> None:
    """Raise ConfigError for a transport that the device of this instance does not go with. Ranks that are processes of their own
    have a GPU only where `engine.device` says so."""
    if config.engine.device == "auto":
        parallel = config.prefill if role == "prefill" else config.decode
        device = "cpu" if parallel.num_ranks > 1 else choose_device("auto").type
        check_device_transport(config.transfer.transport, "auto", device)
