"""A cluster without Ray whose instances are processes of their own on one card: scheduler and frontend are in this process.

`python -m benchmarks.gpu.apart` is such an instance, and ends when its input ends."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import uvloop

from cluster.ingress.delivery.frontend import Frontend
from cluster.instance.instance import Instance
from cluster.instance.instance_parts import Role
from cluster.instance.real_parts import remote_parts
from cluster.scheduler.recorded_scheduler import make_scheduler
from cluster.scheduler.scheduler_node import SchedulerNode
from core.clock import WallClock
from core.config.cluster_config import ClusterConfig, load
from core.errors import ReplicaLost
from core.garbage import leave_out_all_there_is
from device.mps import bound_processors
from net.mail import TcpMail

ROOT = Path(__file__).parents[2]
_START_S, _END_S = 80.0, 5.0
Values = Mapping[str, Any]
"""A configuration, as `core.config.cluster_config.load` takes it."""


@contextlib.asynccontextmanager
async def running(values: Values) -> AsyncGenerator[Frontend]:
    """Yield the frontend when all instances have registered. Raises RuntimeError where one has ended, and TimeoutError."""
    config, key = load(dict(values), {}, {}), os.urandom(16)
    roles: list[Role] = ["prefill"] * config.prefill_instances + ["decode"] * config.decode_instances
    async with contextlib.AsyncExitStack() as stack:
        clock, mail = WallClock(), TcpMail(key, config=config.mail)
        stack.push_async_callback(mail.close)
        node = SchedulerNode(mail, clock, make_scheduler(config.schedule))
        _during(stack, node.run())

        async def resolve() -> list[str]:
            return [mail.address]

        own = TcpMail(key, config=config.mail)
        frontend = Frontend(
            own,
            clock,
            config.schedule,
            config.engine.block_size,
            resolve_schedulers=resolve,
            request_timeout_s=config.serve.request_timeout_s,
        )
        stack.push_async_callback(frontend.close)
        _during(stack, frontend.run())
        given = {"values": dict(values), "key": key.hex(), "scheduler": mail.address}
        children = [
            await stack.enter_async_context(_child(role, given, _environment(config, role))) for role in roles
        ]
        async with asyncio.timeout(_START_S):
            await _all_here(frontend, children)
        yield frontend


def _during(stack: contextlib.AsyncExitStack, work: Any) -> None:
    async def cancel(task: "asyncio.Task[None]") -> None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    stack.push_async_callback(cancel, asyncio.create_task(work))


def _environment(config: ClusterConfig, role: Role) -> dict[str, str]:
    """Return an instance's. It is bounded before it starts, since its imports ask CUDA already. Raises ConfigError."""
    env, pool = os.environ.copy(), config.prefill if role == "prefill" else config.decode
    if pool.shares_card:
        bound_processors(pool.most_sms, f"{role}.sm_share", env)
    return env


@contextlib.asynccontextmanager
async def _child(
    role: Role, given: dict[str, Any], env: dict[str, str]
) -> AsyncGenerator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.gpu.apart", role),
        cwd=ROOT,
        env=env,
        stdin=asyncio.subprocess.PIPE,
    )
    assert child.stdin is not None
    child.stdin.write(json.dumps(given).encode() + b"\n")
    try:
        yield child
    finally:
        child.stdin.close()  # MPS does not say what becomes of others when a client is killed
        try:
            async with asyncio.timeout(_END_S):
                await child.wait()
        except TimeoutError:
            child.kill()
            await child.wait()


async def _all_here(frontend: Frontend, children: list[asyncio.subprocess.Process]) -> None:
    while True:
        for child in children:
            if child.returncode is not None:
                raise RuntimeError(f"an instance has ended with {child.returncode}: the log says why")
        with contextlib.suppress(ReplicaLost):
            if len((await frontend.status()).instances) == len(children):
                return
        await asyncio.sleep(0.02)


async def _serve(role: Role, given: dict[str, Any]) -> None:
    config: ClusterConfig = load(given["values"], {}, {})
    mail = TcpMail(key := bytes.fromhex(given["key"]), config=config.mail)

    async def resolve() -> list[str]:
        return [given["scheduler"]]

    parts = await asyncio.to_thread(remote_parts, config, Path(config.model.path), role, mail, key, _no_ranks)
    instance = Instance(config, role, mail, WallClock(), resolve, parts)
    leave_out_all_there_is()
    instance.run()
    await asyncio.to_thread(sys.stdin.read)


def _no_ranks(_: object) -> Any:
    raise AssertionError("an instance has one rank")


def main() -> None:
    role: Any = sys.argv[1]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uvloop.run(_serve(role, json.loads(sys.stdin.readline())))  # what servers have
    os._exit(0)  # threads of the instance may wait for each other


if __name__ == "__main__":
    main()
