"""The instance that a pool's replica holds, or those of a group's models. Only replicas of pools import this, for it brings torch
with it."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from cluster.deploy.addresses import mail_host, open_mail, scheduler_resolver
from cluster.deploy.kube.topology import read_site
from cluster.deploy.rank_actors import rank_actors
from cluster.instance.colocated_instances import ColocatedInstances, MakeInstance
from cluster.instance.instance_parts import AsleepParts, InstanceParts, Role
from cluster.instance.openmp_files import remove_openmp_files
from cluster.instance.real_parts import asleep_remote_parts, remote_parts
from cluster.instance.resident_instance import ResidentInstance
from core.clock import WallClock
from core.config.cluster_config import ClusterConfig
from core.config.device_transport import check_device_transport
from core.garbage import leave_out_all_there_is
from core.start_timer import StartTimer
from engine.sizing.devices import choose_device
from models.files.hub import resolve
from net.mail import TcpMail

INSTANCES = "BATON_KUBE_INSTANCES"
"""How many instances a pod of the chart has. They alone share its memory and processors."""


async def make_instances(
    configs: Sequence[ClusterConfig],
    key: bytes,
    role: Role,
    schedulers: Sequence[Any],
    *,
    one_host: bool,
    timer: StartTimer,
) -> ResidentInstance | ColocatedInstances:
    """Make the instance of one model, or those of a group's. They run. Returns when the only model is loaded and all ranks are
    there. A group's models begin asleep. `timer` has timed the imports. Raises ConfigError and ReplicaLost."""
    remove_openmp_files()
    if not configs[0].schedule.residency.group:
        instance = await _make_instance(configs[0], key, role, schedulers[0], one_host=one_host, timer=timer)
        leave_out_all_there_is()
        instance.run()
        return instance

    def making(config: ClusterConfig, scheduler: Any) -> MakeInstance:
        return lambda role, rests: _make_asleep(config, key, role, scheduler, rests, one_host=one_host)

    makes = [making(*each) for each in zip(configs, schedulers, strict=True)]
    instances = ColocatedInstances(role, makes, WallClock())
    await instances.start()
    leave_out_all_there_is()
    return instances


async def _make_asleep(
    config: ClusterConfig, key: bytes, role: Role, scheduler: Any, rests: str, *, one_host: bool
) -> ResidentInstance:
    """Make an instance that runs and sleeps. `rests` as in `ResidentInstance`."""
    _check_device(config, role)
    host = mail_host(one_host=one_host)
    mail = open_mail(config, key, one_host=one_host)
    try:
        folder = await asyncio.to_thread(resolve, config.model.path)
        place = partial(rank_actors, config, role, key, host)
        parts = asleep_remote_parts(config, folder, role, mail, key, place)
        instance = await _resident(config, role, mail, scheduler, parts, rests)
    except BaseException:
        await mail.close()
        raise
    instance.run()
    return instance


async def _resident(
    config: ClusterConfig,
    role: Role,
    mail: TcpMail,
    scheduler: Any,
    parts: InstanceParts | AsleepParts,
    rests: str = "",
) -> ResidentInstance:
    return ResidentInstance(
        config,
        role,
        mail,
        WallClock(),
        scheduler_resolver(scheduler),
        replace(parts, site=await asyncio.to_thread(read_site, os.environ)),
        num_spare_schedulers=config.num_spare_schedulers,
        rests=rests,
    )


async def _make_instance(
    config: ClusterConfig, key: bytes, role: Role, scheduler: Any, *, one_host: bool, timer: StartTimer
) -> ResidentInstance:
    _check_device(config, role)
    host = mail_host(one_host=one_host)
    mail = open_mail(config, key, one_host=one_host)
    timer.begin("files")
    folder, place = resolve(config.model.path), partial(rank_actors, config, role, key, host)
    num_instances = int(os.environ.get(INSTANCES, "0"))
    parts = await asyncio.to_thread(
        remote_parts, config, folder, role, mail, key, place, timer=timer, num_instances=num_instances
    )
    return await _resident(config, role, mail, scheduler, parts)


def _check_device(config: ClusterConfig, role: Role) -> None:
    """Raise ConfigError for a transport that the device of this instance does not go with. Ranks that are processes of their own
    have a GPU only where `engine.device` says so."""
    if config.engine.device == "auto":
        parallel = config.prefill if role == "prefill" else config.decode
        device = "cpu" if parallel.num_ranks > 1 else choose_device("auto").type
        check_device_transport(config.transfer.transport, "auto", device)
