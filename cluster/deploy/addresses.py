"""Where the cluster's processes listen for each other, and how they find the schedulers."""

from typing import Any

import ray.util

from core.config.cluster_config import ClusterConfig
from core.ports import Resolve
from net.mail import TcpMail
from net.tls import tls_of


def scheduler_resolver(scheduler: Any) -> Resolve:
    """Return a function that asks the Scheduler deployment where its replicas listen now. It leaves out those that do not
    answer."""

    async def resolve() -> list[str]:
        asked = scheduler.broadcast("endpoint")
        answers: list[Any] = await asked.results_async(timeout_s=10, return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, str)]

    return resolve


def mail_host(*, one_host: bool) -> str:
    """Return where this process listens for its peers: on loopback as long as all of them are on this host."""
    return "127.0.0.1" if one_host else ray.util.get_node_ip_address()


def open_mail(config: ClusterConfig, key: bytes, *, one_host: bool) -> TcpMail:
    """Return a mail of this process, which listens where `mail_host` says."""
    host = mail_host(one_host=one_host)
    return TcpMail(key, host, config=config.mail, tls=tls_of(config.security, key))
