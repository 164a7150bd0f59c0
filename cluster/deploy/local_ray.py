"""The Ray that `baton serve` starts: on loopback alone, without needless processes, and without a file left when it ends."""

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray._private import node, services
from ray.job_config import JobConfig

from cluster.deploy.ray_loopback import keep_ray_to_loopback
from cluster.deploy.ray_node import PatientNode
from cluster.deploy.session_folder import claim, remove, remove_abandoned
from cluster.instance.openmp_files import remove_openmp_files
from core.errors import ConfigError

log = logging.getLogger(__name__)

_STARTS = 3
_AGENT = "--dashboard_agent_command="
_ROOT = Path(__file__).parents[2]


class _OneHostNode(PatientNode):
    """A node without the four processes that serve other hosts, other users and Ray's own dashboard. Ray has no option for
    that."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Start the node. Ray leaves its processes behind where they do not come up in time, so they are ended here."""
        try:
            super().__init__(*arguments, **options)
        except Exception:
            with contextlib.suppress(AttributeError):  # it had not begun to start any
                self.kill_all_processes(check_alive=False, allow_graceful=False)
            raise

    def start_monitor(self) -> None:
        """Do nothing: the autoscaler has nothing to scale."""

    def start_log_monitor(self) -> None:
        """Do nothing: the workers' logs are not read through Ray."""

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """Do nothing: there is no dashboard."""

    def start_raylet(self, *arguments: Any, **options: Any) -> None:
        """Start the raylet without the agent that tells a dashboard of the node, its metrics and logs. A raylet ends with that
        agent, and gives it a pipe that ends with the raylet: `cat` is all that it takes."""
        usual = services.start_ray_process
        services.start_ray_process = lambda command, *others, **more: usual(
            [_AGENT + "cat" if part.startswith(_AGENT) else part for part in command], *others, **more
        )
        try:
            super().start_raylet(*arguments, **options)
        finally:
            services.start_ray_process = usual


class _OwnTree(JobConfig):
    """Has all processes load Baton's packages from where this one has. Ray would look in the working folder first, where a
    user may have a `models` or a `net.py`."""

    def __init__(self) -> None:
        super().__init__(_py_driver_sys_path=[str(_ROOT)])

    def _runtime_env_has_working_dir(self) -> bool:
        """Return True: the working folder, and that of the program, are not to be looked in."""
        return True


def _patiently(start: Callable[[], Any]) -> Any:
    """Start Ray, and again where it fails. Ray gives a node 30 s to come up and has no key for that, so a start may fail on a
    busy machine. Raises ConfigError when the last try fails, too."""
    for _ in range(_STARTS - 1):
        try:
            return start()
        except Exception as error:
            log.warning("Ray did not start, and is started again: %s", error)
            ray.shutdown()
    try:
        return start()
    except Exception as error:
        raise ConfigError(
            f"Ray did not start in {_STARTS} tries: {error} A machine this busy can serve without Ray: `make local`, or "
            "`baton serve --local`"
        ) from error


class LocalRay:
    """A Ray of this host alone, until `stop`. This process is connected to it."""

    def __init__(self, num_cpus: int, num_gpus: int, namespace: str, environment: Mapping[str, str]) -> None:
        """`environment` is that of all its processes."""
        keep_ray_to_loopback()
        os.environ.update(environment)
        usual, node.Node = node.Node, _OneHostNode
        try:
            context = _patiently(
                lambda: ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    num_gpus=num_gpus,
                    include_dashboard=False,
                    namespace=namespace,
                    job_config=_OwnTree(),
                    logging_level=logging.ERROR,
                    log_to_driver=False,
                )
            )
        finally:
            node.Node = usual
        self._session = Path(context.address_info["session_dir"])
        claim(self._session)
        remove_abandoned(self._session.parent)

    def stop(self) -> None:
        """End its processes and remove their folder."""
        ray.shutdown(wait_for_processes=True)
        remove(self._session)
        remove_openmp_files()
