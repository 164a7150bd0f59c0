"""The deployment of the HTTP endpoint. Several replicas may run, also on one host; each request lives in one of them.

This module stays light, because the process that deploys the application imports it too."""

import contextlib
import os
import sys
from typing import Any

from ray import serve

from cluster.deploy.process_logs import configure_logging
from cluster.deploy.ray_loopback import keep_replica_to_loopback
from core.config.cluster_config import ClusterConfig


@serve.deployment
class Ingress:
    """A replica of the endpoint. When Serve takes it away, it tells load balancers first, and finishes what it has."""

    async def __init__(
        self, config: ClusterConfig, key: bytes, schedulers: list[Any], pools: list[Any], *, one_host: bool
    ) -> None:
        configure_logging(config.serve.log_level, config.serve.log_format)
        if one_host:
            keep_replica_to_loopback()
        leave_out_torch()
        # It brings the API, for this process alone.
        from cluster.deploy.ingress_process import make_ingress  # noqa: PLC0415

        self._ingress = await make_ingress(config, key, schedulers, one_host=one_host)
        del pools  # bound here only so that Serve deploys them with this application

    async def drain(self) -> None:
        """Wait until nothing runs any more, or until the deadline. Another call waits for the same end."""
        await self._ingress.drain()

    async def why_not(self) -> str:
        """Return why a request for one of the models would not be answered now; empty where each would be."""
        return await self._ingress.why_not()

    async def check_health(self) -> None:
        if self._ingress.has_stopped:
            raise RuntimeError("this ingress has stopped listening")

    async def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the constructor failed
            await self._ingress.close()


def leave_out_torch() -> None:
    """Keep transformers from importing torch: its tokenizers do without, but it imports torch wherever that is installed, which
    takes 3 s and 300 MB."""
    assert "torch" not in sys.modules
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]  # to Python: there is no such module
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
