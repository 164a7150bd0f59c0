"""The pools' sizes as Ray Serve keeps them: changed in place, so that nothing is deployed again and nothing else restarts.

Serve starts replicas where Ray has room (and Ray's autoscaler, `ray up`'s or KubeRay's, makes room for those that wait), and lets
a replica that it ends drain first (`pool_deployments`)."""

from typing import Any

import ray
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from cluster.scheduler.scaling.scaler import PoolName

_DEPLOYMENTS: dict[PoolName, str] = {"prefill": "PrefillPool", "decode": "DecodePool"}


class ServeSizes:
    """The autoscaler's `PoolSizes`. `app` must be deployed with `external_scaler_enabled`, or Serve refuses to change it."""

    def __init__(self, app: str, suffix: str = "") -> None:
        """`suffix`: what the names of the pools' deployments end with."""
        self._app = app
        self._names: dict[PoolName, str] = {pool: name + suffix for pool, name in _DEPLOYMENTS.items()}
        self._controller: Any = None

    async def get(self) -> dict[PoolName, int]:
        details = await self._ask().get_serve_instance_details.remote()
        deployments = details["applications"][self._app]["deployments"]
        return {
            pool: deployments[name]["target_num_replicas"]
            for pool, name in self._names.items()
            if name in deployments
        }

    async def set(self, pool: PoolName, num_instances: int) -> None:
        deployment = DeploymentID(name=self._names[pool], app_name=self._app)
        await self._ask().update_deployment_replicas.remote(deployment, num_instances)

    def _ask(self) -> Any:
        if self._controller is None:
            self._controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        return self._controller
