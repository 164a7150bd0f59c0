"""One suite for every Comm: alone, over gloo between real processes, and over NCCL where there are GPUs."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.errors import ReplicaLost
from parallel.comm import Backend, Comm, GroupComm, connect
from tests.parallel.world import World
from tests.patience import PATIENCE_S

CASES = [
    pytest.param(1, "gloo", id="alone"),
    pytest.param(2, "gloo", id="gloo2"),
    pytest.param(4, "gloo", id="gloo4"),
    pytest.param(2, "nccl", id="nccl2", marks=pytest.mark.multi_gpu),
]


@pytest.fixture(autouse=True)
def _enough_gpus(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("multi_gpu") and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


def open_comm(rank: int, store: Any, size: int, backend: Backend, **more: Any) -> tuple[Comm, torch.device]:
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    return connect(store, "all", range(size), rank, backend=backend, device=device, **more), device


def sums(rank: int, store: Any, size: int, backend: Backend) -> None:
    comm, device = open_comm(rank, store, size, backend)
    assert (comm.rank, comm.size) == (rank, size)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.full((3, 2), rank + 1.0, dtype=dtype, device=device)
        assert comm.all_reduce(x).tolist() == [[size * (size + 1) / 2] * 2] * 3
    gathered = comm.all_gather(torch.tensor([rank, 7], device=device))
    assert [piece.tolist() for piece in gathered] == [[r, 7] for r in range(size)]
    comm.close()


def exchange(rank: int, store: Any, size: int, backend: Backend) -> None:
    """Rank r sends (r + to) % 3 rows to each; some of them nobody, and once nobody anything."""
    comm, device = open_comm(rank, store, size, backend)

    def rows(source: int, to: int) -> int:
        return (source + to) % 3

    for dtype in (torch.bfloat16, torch.int64):
        x = torch.cat([torch.full((rows(rank, to), 5), 10 * rank + to) for to in range(size)]).to(
            device, dtype
        )
        counts = [rows(source, rank) for source in range(size)]
        got = comm.all_to_all(x, [rows(rank, to) for to in range(size)], counts)
        assert got.dtype == dtype
        assert got[:, 0].tolist() == [10 * s + rank for s in range(size) for _ in range(rows(s, rank))]
    nothing = comm.all_to_all(torch.empty(0, 5, device=device), [0] * size, [0] * size)
    assert nothing.shape == (0, 5)
    comm.close()


def in_order(rank: int, store: Any, size: int, backend: Backend) -> None:
    """Everybody sends before anybody receives, many at once."""
    comm, device = open_comm(rank, store, size, backend)
    to, source = (rank + 1) % size, (rank - 1) % size
    for number in range(40):
        comm.send(torch.full((number % 3 + 1, 2), float(number), dtype=torch.bfloat16, device=device), to)
    for number in range(40):
        got = comm.recv((number % 3 + 1, 2), torch.bfloat16, source)
        assert set(got.flatten().tolist()) == {float(number)}
    comm.close()


@pytest.mark.parametrize(("size", "backend"), CASES)
def test_sums_and_gathers(size: int, backend: Backend, world: World) -> None:
    world.run(size, sums, size, backend)


@pytest.mark.parametrize(("size", "backend"), CASES)
def test_rows_go_where_they_should_in_any_number(size: int, backend: Backend, world: World) -> None:
    world.run(size, exchange, size, backend)


@pytest.mark.parametrize(("size", "backend"), [case for case in CASES if case.id != "alone"])
def test_what_is_sent_comes_in_order_and_nobody_waits(size: int, backend: Backend, world: World) -> None:
    world.run(size, in_order, size, backend)


def stuck(rank: int, store: Any) -> float:
    """The deadline is short only for what comes after both have met, however long that has taken."""
    patience = timedelta(seconds=PATIENCE_S)
    group = dist.ProcessGroupGloo(store, rank, 2, patience)
    comm = GroupComm(group, rank, 2, torch.device("cpu"))
    comm.all_reduce(torch.zeros(1))
    if rank == 1:
        store.wait(["heard"], patience)
        return 0.0
    group._set_default_timeout(timedelta(seconds=1))
    started = time.monotonic()
    try:
        with pytest.raises(ReplicaLost):
            comm.all_reduce(torch.zeros(1))
    finally:
        store.set("heard", "")
    return time.monotonic() - started


def test_a_rank_that_does_not_do_its_part_is_an_error_at_the_deadline(world: World) -> None:
    waited_s, _ = world.run(2, stuck)
    assert waited_s > 0.9


def missing(rank: int, store: Any) -> None:
    with pytest.raises(ReplicaLost, match=r"\[0, 1\]"):
        open_comm(0, store, 2, "gloo", timeout_s=1.0)


def test_a_group_that_is_not_complete_does_not_start(world: World) -> None:
    world.run(1, missing)
