"""Starts the cluster on this machine (or joins a running Ray cluster), waits until it answers, and takes it down again."""

import contextlib
import io
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cluster.deploy.cluster_key import cluster_key
from cluster.deploy.deployment_phases import wait_running
from cluster.deploy.local_ray import LocalRay
from cluster.deploy.rank_bundles import no_room
from cluster.deploy.ray_address import join_ray
from cluster.deploy.ray_loopback import is_on_loopback
from cluster.deploy.serve_app import ENVIRONMENT, build_application
from core.config.cluster_config import ClusterConfig
from core.config.pools import pools_of
from core.config.residency_groups import colocations_of
from core.errors import ConfigError

_APP = "baton"
_READY_TIMEOUT_S = 300.0
_LOG_BYTES = 64 << 20


def serve_cluster(
    config: ClusterConfig,
    ray_address: str,
    on_ready: Callable[[], None],
    on_stop: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """Run until SIGINT or SIGTERM; then finish running requests, stop every replica and Ray itself (if started here)."""
    stop = threading.Event()
    started = time.monotonic()
    _on_signals(signal.default_int_handler)

    def on_phase(name: str) -> None:
        _on_signals(signal.default_int_handler)  # Ray has put its own handlers in
        say(f"  {time.monotonic() - started:5.1f} s  {name}")

    try:
        cluster = Cluster.start(config, ray_address, on_phase)
    except KeyboardInterrupt:
        say("  stopped before it was ready")
        return
    try:
        _on_signals(lambda *_: stop.set())
        if cluster.wait_ready(stop):
            say(f"  {time.monotonic() - started:5.1f} s  ready")
            on_ready()
            stop.wait()
        on_stop()
        cluster.drain()
    finally:
        cluster.stop()


class Cluster:
    """A running Serve application. Owns the local Ray cluster when it has started one."""

    def __init__(self, config: ClusterConfig, handle: Any, local: LocalRay | None) -> None:
        self._config, self._handle, self._local = config, handle, local

    @classmethod
    def start(
        cls,
        config: ClusterConfig,
        ray_address: str = "local",
        on_phase: Callable[[str], None] = lambda _: None,
    ) -> "Cluster":
        """Start the application. Returns when it runs; it answers once `wait_ready` says so. `on_phase` is called with what runs
        already. Raises ConfigError."""
        one_host = ray_address == "local" or is_on_loopback(ray_address)
        local = _init_ray(config, ray_address)
        try:
            on_phase("Ray")
            serve.start(proxy_location="Disabled")
            environment = ENVIRONMENT if local is None else {}
            application = build_application(config, cluster_key(config), environment, one_host=one_host)
            target = serve.RunTarget(
                application,
                _APP,
                route_prefix=None,
                external_scaler_enabled=any(row.scaling.enabled for row in config.rows),
            )
            (handle,) = serve.run_many([target], wait_for_applications_running=False)
            wait_running(_APP, on_phase)
        except BaseException:
            _stop(local)
            raise
        return cls(config, handle, local)

    def wait_ready(self, stop: threading.Event | None = None, timeout_s: float = _READY_TIMEOUT_S) -> bool:
        """Wait for the first answer. Returns True once a request would be answered, False when `stop` was set first. Raises
        ConfigError at the deadline."""
        deadline = time.monotonic() + timeout_s
        stop = stop or threading.Event()
        last = "no answer yet"
        while time.monotonic() < deadline:
            try:
                last = self._handle.why_not.remote().result(timeout_s=5.0)
                if not last:
                    return True
            except (RayServeException, RayError, TimeoutError) as error:
                last = str(error).partition("\n")[0]
            if stop.wait(0.1):
                return False
        nodes: list[dict[str, Any]] = ray.nodes()
        there = [node["Resources"] for node in nodes if node["Alive"]]
        why = next(filter(None, (no_room(row, there) for row in self._config.rows)), "")
        raise ConfigError(
            f"the cluster was not ready after {timeout_s:g} s; {why or f'the ingress said: {last}'}"
        )

    def drain(self) -> None:
        """Let every ingress take no more requests and finish the running ones, within the configuration's deadlines."""
        longest_s = self._config.serve.drain_notice_s + self._config.serve.drain_timeout_s
        self._handle.broadcast("drain").results(timeout_s=longest_s + 10)

    def stop(self) -> None:
        _stop(self._local)


def _on_signals(handler: Callable[[int, Any], Any]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _init_ray(config: ClusterConfig, ray_address: str) -> LocalRay | None:
    """Start or join a Ray. Returns None where this process has joined one that was started elsewhere."""
    # Ray runs its workers at niceness 15 by default: anything else on the machine would come before every token.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Ray keeps what its workers write for good: here, so much of each, and one file before it.
    os.environ.setdefault("RAY_ROTATION_MAX_BYTES", str(_LOG_BYTES))
    os.environ.setdefault("RAY_ROTATION_BACKUP_COUNT", "1")
    logging.getLogger("ray").setLevel(logging.ERROR)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if ray_address != "local":
        join_ray(ray_address, namespace=_APP)
        return None
    # Logical CPUs, enough for Ray to place every replica. The number of threads that run is engine.num_threads.
    num_cpus = max(2, int(_asked_cpus(config) + 0.2 * config.ingress_instances + 1))
    return LocalRay(num_cpus, _offered_gpus(config), _APP, ENVIRONMENT)


def _asked_cpus(config: ClusterConfig) -> float:
    """Return what schedulers, pools and groups ask of Ray at the most."""
    pools = sum(_cpus_of_pools(each.first) for each in colocations_of(config))
    return pools + 0.1 * (
        len(config.residency_groups) + sum(row.num_scheduler_processes for row in config.rows)
    )


def _cpus_of_pools(config: ClusterConfig) -> float:
    scaling = config.scaling
    num_decode = scaling.decode_max if scaling.enabled else config.decode_instances
    num_prefill = (
        scaling.prefill_max if scaling.enabled and config.prefill_instances else config.prefill_instances
    )
    return num_prefill * config.cpus_of(config.prefill) + num_decode * config.cpus_of(config.decode)


def _offered_gpus(config: ClusterConfig) -> int:
    """Return the GPUs to offer to a Ray of this host alone. A process on Ray sees only the GPUs that it has asked for. Raises
    ConfigError."""
    on_gpus = [each.first for each in colocations_of(config) if each.first.engine.device == "cuda"]
    if not on_gpus:
        return 0
    import torch  # noqa: PLC0415 (seconds, which only a cluster on GPUs needs to spend here)

    num_needed, num_gpus = sum(map(_gpus_of_model, on_gpus)), torch.cuda.device_count()
    if num_gpus < num_needed:
        raise ConfigError(
            f"engine.device is cuda: {num_needed} ranks need a GPU each, and this host has {num_gpus}"
        )
    if any(row.decode.shares_card for row in on_gpus) and len(on_gpus) > 1:
        raise ConfigError(
            "decode.gpu_share below 1 needs a Ray node for each card: with several models start these, and give --ray-address"
        )
    return 1 if on_gpus[0].decode.shares_card else num_gpus


def _gpus_of_model(config: ClusterConfig) -> int:
    """Return how many GPUs its instances need. Raises ConfigError."""
    if not config.decode.shares_card:
        return sum(pool.num_ranks for pool in pools_of(config))
    if max(config.prefill_instances, config.decode_instances) > 1:
        raise ConfigError(
            f"decode.gpu_share is {config.decode.gpu_share:g}, and there are {config.prefill_instances} prefill and "
            f"{config.decode_instances} decode instances: on one host alone there is a card for one of each"
        )
    return 1


def _stop(local: LocalRay | None) -> None:
    """Stop every replica, and Ray itself when it was started here.

    Ray's output meanwhile is dropped: it calls the end of its own controller, which was asked for, a failure."""
    with contextlib.redirect_stdout(io.StringIO()):
        serve.shutdown()
        if local is not None:
            local.stop()
