"""Whether an MPS daemon listens, as a process of ours finds out, and what it tells CUDA then."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.errors import ConfigError
from device.mps import PIPE_DIRECTORY, THREAD_PERCENTAGE, bound_processors, why_no_daemon


@pytest.fixture(params=[socket.SOCK_SEQPACKET, socket.SOCK_STREAM], ids=["packets", "stream"])
def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, request.param) as listener:
        listener.bind(str(tmp_path / "control"))
        listener.listen()
        listener.settimeout(0)
        yield listener


def test_a_daemon_that_listens_is_found_and_not_disturbed(daemon: socket.socket, tmp_path: Path) -> None:
    assert why_no_daemon({PIPE_DIRECTORY: str(tmp_path)}) == ""
    with pytest.raises(BlockingIOError):
        daemon.accept()


def test_what_a_daemon_that_has_ended_left_behind_is_none(daemon: socket.socket, tmp_path: Path) -> None:
    daemon.close()
    assert (tmp_path / "control").exists()
    why = why_no_daemon({PIPE_DIRECTORY: str(tmp_path)})
    assert f"no MPS daemon listens at {tmp_path}/control (Connection refused)" in why
    assert "nvidia-cuda-mps-control -d" in why


def test_a_share_of_the_processors_is_said_to_cuda(daemon: socket.socket, tmp_path: Path) -> None:
    env = {PIPE_DIRECTORY: str(tmp_path)}
    for share, said in ((0.29, "29"), (0.7, "70"), (0.001, "1")):
        bound_processors(share, "decode.sm_share", env)
        assert env[THREAD_PERCENTAGE] == said


def test_without_a_daemon_a_bound_is_refused_and_all_processors_are_not(tmp_path: Path) -> None:
    env = {PIPE_DIRECTORY: str(tmp_path), THREAD_PERCENTAGE: "25"}
    with pytest.raises(
        ConfigError, match=r"decode\.sm_share bounds it to 40% .* no MPS daemon .* set decode\.sm_share to 1"
    ):
        bound_processors(0.4, "decode.sm_share", env)
    bound_processors(1, "decode.sm_share", env)
    assert THREAD_PERCENTAGE not in env
