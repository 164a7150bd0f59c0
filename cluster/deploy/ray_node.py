"""A Ray node that comes up without waiting for its agents."""

import contextlib
import random
import socket
from typing import Any

from ray import _raylet
from ray._private import node

_ray: Any = _raylet
_NOT_USED = -1
_PORTS = range(20_000, 32_000)
_UNUSED_AGENTS = (
    _ray.METRICS_AGENT_PORT_NAME,
    _ray.METRICS_EXPORT_PORT_NAME,
    _ray.DASHBOARD_AGENT_LISTEN_PORT_NAME,
)


class PatientNode(node.Node):
    """A node whose raylet does not wait for the agent of metrics and logs.

    Ray's raylet waits 15 s for the files in which its agents write their ports, and aborts when that is too short, as on a busy
    machine (ray-project/ray#65983). Here the files of the agent that nobody asks are written beforehand, with Ray's own number
    for "not in use"; the agent of runtime environments, which Ray asks again until it answers, is given its port. A node is up
    2 s earlier, too."""

    def start_raylet(self, *arguments: Any, **options: Any) -> None:
        """Start the raylet, as Ray does."""
        for name in _UNUSED_AGENTS:
            _ray.persist_port(self._session_dir, self._node_id, name, _NOT_USED)
        self._ray_params.runtime_env_agent_port = _free_port()
        super().start_raylet(*arguments, **options)


def _free_port() -> int:
    """A port that nobody listens at, below those that Linux gives to outgoing connections: the agent binds it seconds later, and
    the node ends with an agent that cannot."""
    for port in random.sample(_PORTS, len(_PORTS)):
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("", port))
            return port
    raise OSError(
        f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free for Ray's agent of runtime environments"
    )
