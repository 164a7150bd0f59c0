"""Starting and ending an instance's processes: all or none, and nobody is left behind."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster.deploy.kube.serving_mark import FOLDER, ServingMark
from cluster.instance.shared_memory import take_memory
from core.config.cluster_config import EngineConfig, MailConfig, ModelConfig
from core.errors import ConfigError, Hung, ReplicaLost
from engine.ranks.child_ranks import Child, start_children
from engine.ranks.process_group import ProcessGroup
from engine.ranks.rank import Rank, rank_name
from engine.ranks.rank_messages import MemoryPlace, RankSetup
from engine.ranks.rank_process import serve_instance
from engine.ranks.start_ranks import setups_of
from engine.sizing.pool_size import size_pool
from parallel.mesh import Mesh
from tests.parallel.forked_child import ForkedChild, forked_children
from tests.parallel.forked_ranks import forked_ranks, start_forked
from tests.parallel.test_served import checkpoint, ranks
from tests.patience import PATIENCE_S
from tests.processes import is_running

KEPT: list[memoryview] = []
"""As an instance keeps the memory of its ranks."""
ENGINE = EngineConfig(block_size=4, num_blocks=20)


def setups(folder: Path, mesh: Mesh) -> list[RankSetup]:
    size = size_pool(folder, ModelConfig(path=str(folder)), ENGINE, mesh)
    memory, path = take_memory(size.num_bytes)
    KEPT.append(memory)
    return setups_of(
        folder, ENGINE, size, mesh, memories=[MemoryPlace(size.num_bytes, path)], devices=["cpu"] * mesh.size
    )


@pytest.mark.slow
async def test_what_one_rank_cannot_do_is_said_and_none_is_left(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    mesh = Mesh(tp=2)
    wanted = setups(tmp_path, mesh)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"rank \d of 2 .* did not start: "):
        ProcessGroup(wanted, None, start_children)
    assert ranks() == []


@pytest.mark.slow
async def test_a_group_that_is_late_is_ended(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    with pytest.raises(ReplicaLost, match="not ready after 0 s"):
        ProcessGroup(setups(tmp_path, Mesh(tp=2)), None, start_children, 0.05)
    assert ranks() == []


MAIL = MailConfig(heartbeat_s=0.1, peer_timeout_s=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
async def test_a_rank_that_is_stopped_between_steps_is_noticed_and_all_are_ended(
    stopped: int, tmp_path: Path
) -> None:
    checkpoint(tmp_path)
    group = ProcessGroup(setups(tmp_path, Mesh(tp=2)), None, start_forked, mail=MAIL)
    forked_ranks()[stopped].send_signal(signal.SIGSTOP)
    async with asyncio.timeout(PATIENCE_S):
        error = await group.lost()
    assert isinstance(error, Hung)
    assert str(error) == f"rank {stopped} of 2 (pp0 dp0 ep0 tp{stopped}) sent nothing for 1 s"
    assert forked_ranks() == []
    await group.close()


def rank_with_mark(sock: socket.socket) -> int:
    return serve_instance(sock, on_beat=ServingMark(os.environ).renew)


@pytest.mark.slow
async def test_a_rank_that_is_stopped_renews_its_pods_mark_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a rank on another host than its replica."""
    checkpoint(tmp_path)
    monkeypatch.setenv(FOLDER, str(tmp_path / "marks"))

    def start(setups: Sequence[RankSetup], deadline_s: float) -> list[Rank]:
        return [ForkedChild(rank_name(setup), rank_with_mark) for setup in setups]

    group = ProcessGroup(setups(tmp_path, Mesh(tp=2)), None, start, mail=MAIL)
    stopped, other = (tmp_path / "marks" / str(one.pid) for one in forked_children(rank_with_mark))
    async with asyncio.timeout(PATIENCE_S):
        while not (stopped.exists() and other.exists()):
            await asyncio.sleep(0.01)
        forked_children(rank_with_mark)[0].send_signal(signal.SIGSTOP)
        await group.lost()
    assert other.stat().st_mtime - stopped.stat().st_mtime > MAIL.peer_timeout_s / 2
    await group.close()


async def test_ranks_that_a_driver_keeps_are_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process within a driver's call cannot be killed before that returns."""
    child = Child("rank 0 of 1", "engine.ranks.rank_process")
    killed: list[str] = []
    monkeypatch.setattr("engine.ranks.child_ranks.END_S", 0.1)
    with monkeypatch.context() as driver:
        driver.setattr(subprocess.Popen, "kill", lambda _: killed.append("kill"))
        child.end()
    assert killed == ["kill"]
    assert "rank 0 of 1 was killed, and a driver keeps its process" in caplog.text
    child.end()
    assert not is_running(child.pid)


PAUSED = """
    import asyncio, sys
    from pathlib import Path
    from parallel.mesh import Mesh
    from engine.ranks.process_group import ProcessGroup
    from engine.ranks.child_ranks import Child, start_children
    from tests.parallel.test_ranks import MAIL, setups

    async def main():
        group = ProcessGroup(setups(Path(sys.argv[1]), Mesh(pp=2)), None, start_children, mail=MAIL)
        lost = asyncio.create_task(group.lost())
        print(*[rank.pid for rank in group.ranks], flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await asyncio.sleep(2 * MAIL.peer_timeout_s)
        print(lost.result() if lost.done() else "whole", flush=True)

    asyncio.run(main())
"""


@pytest.mark.slow
def test_no_rank_is_taken_for_hung_when_all_processes_were_stopped(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    command = [sys.executable, "-c", textwrap.dedent(PAUSED), str(tmp_path)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": "."},
    ) as host:
        assert host.stdin is not None
        assert host.stdout is not None
        pids = [host.pid, *map(int, host.stdout.readline().split())]
        assert len(pids) == 3
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(3 * MAIL.peer_timeout_s)
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
        said, _ = host.communicate("go on\n", PATIENCE_S)
        assert said.strip() == "whole"


HOST = """
    import asyncio, sys
    from pathlib import Path
    from parallel.mesh import Mesh
    from engine.ranks.process_group import ProcessGroup
    from engine.ranks.child_ranks import Child, start_children
    from tests.parallel.test_ranks import setups

    async def main():
        group = ProcessGroup(setups(Path(sys.argv[1]), Mesh(pp=2)), None, start_children)
        print(*[rank.pid for rank in group.ranks], flush=True)
        await asyncio.sleep(100)

    asyncio.run(main())
"""


@pytest.mark.slow
def test_ranks_die_with_their_instance_and_leave_no_file(tmp_path: Path) -> None:
    model, temporary = tmp_path / "model", tmp_path / "temporary"
    model.mkdir()
    temporary.mkdir()
    checkpoint(model)
    command = [sys.executable, "-c", textwrap.dedent(HOST), str(model)]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": ".", "TMPDIR": str(temporary)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root, env=environment) as host:
        assert host.stdout is not None
        pids = [int(pid) for pid in host.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_running, pids))
        host.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "a rank has outlived its instance"
        time.sleep(0.02)
    assert list(temporary.iterdir()) == []
