"""Who writes a file of packed weights, who waits for it, and which files go."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.cpu.pages import large_pages, taken_from
from kernels.cpu.weights_file import KeptArena, MappedFile
from models.files.weights_folder import WeightsDraft, WeightsFolder

FORKED = multiprocessing.get_context("fork")
DAY_S = 86_400


def written(folder: WeightsFolder, key: str, num_bytes: int = 1 << 20) -> WeightsDraft:
    """Write a file and use it."""
    draft = folder.claim(key)
    assert isinstance(draft, WeightsDraft)
    arena = KeptArena()
    with taken_from(arena):
        piece = arena.kept(large_pages(num_bytes).fill_(7))
    assert piece is not None
    arena.become(draft.file, [{"piece": (0, piece.at, piece.num_bytes)}])
    draft.publish()
    return draft


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def in_another_process(run: Callable[[], None]) -> int:
    """Returns its exit code."""
    process = FORKED.Process(target=run)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def test_the_first_writes_and_others_find_what_it_has_written(tmp_path: Path) -> None:
    folder = WeightsFolder(tmp_path / "cache")
    draft = written(folder, "a")
    assert isinstance(folder.claim("a"), MappedFile)
    assert names(tmp_path / "cache") == ["a.weights"]
    assert (tmp_path / "cache" / "a.weights").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    del draft


def test_one_that_comes_meanwhile_waits_for_the_writer(tmp_path: Path) -> None:
    folder = WeightsFolder(tmp_path)
    draft = folder.claim("a")
    assert isinstance(draft, WeightsDraft)
    found: list[object] = []
    other = threading.Thread(target=lambda: found.append(WeightsFolder(tmp_path).claim("a")))
    other.start()
    arena = KeptArena()
    with taken_from(arena):
        arena.kept(large_pages(5000))
    assert not found
    arena.become(draft.file, [])
    draft.publish()
    other.join()
    assert isinstance(found[0], MappedFile)


def test_one_that_waits_goes_on_alone_when_the_writer_gives_up(tmp_path: Path) -> None:
    draft = WeightsFolder(tmp_path).claim("a")
    assert isinstance(draft, WeightsDraft)
    found: list[object] = []
    other = threading.Thread(target=lambda: found.append(WeightsFolder(tmp_path).claim("a")))
    other.start()
    while other.is_alive():
        time.sleep(0.05)  # until it has begun to wait, which nobody can see
        draft.give_up()
    assert found in ([None],) or isinstance(found[0], WeightsDraft)


def test_nobody_waits_for_a_writer_without_progress(tmp_path: Path) -> None:
    draft = WeightsFolder(tmp_path).claim("a")
    assert isinstance(draft, WeightsDraft)
    assert WeightsFolder(tmp_path, patience_s=0.1).claim("a") is None


def test_what_a_killed_writer_has_left_is_written_anew(tmp_path: Path) -> None:
    def die() -> None:
        draft = WeightsFolder(tmp_path).claim("a")
        assert isinstance(draft, WeightsDraft)
        os.pwrite(draft.file.descriptor, b"half", 0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_another_process(die) == -signal.SIGKILL
    assert names(tmp_path) == ["a.draft"]
    folder = WeightsFolder(tmp_path)
    draft = written(folder, "a")
    assert isinstance(folder.claim("a"), MappedFile)
    del draft


def test_what_a_killed_writer_has_left_goes_when_others_need_room(tmp_path: Path) -> None:
    def die() -> None:
        assert isinstance(WeightsFolder(tmp_path).claim("a"), WeightsDraft)
        os.kill(os.getpid(), signal.SIGKILL)

    in_another_process(die)
    folder = WeightsFolder(tmp_path)
    own = folder.claim("b")
    assert folder.make_room(1)
    assert names(tmp_path) == ["b.draft"], "its own draft stays"
    del own


def test_the_least_recently_used_go_first_and_none_that_is_used(tmp_path: Path) -> None:
    free = [100 << 20]
    folder = WeightsFolder(tmp_path, free_bytes=lambda _: free[0])
    in_use = written(folder, "used")
    for key in ("old", "new"):
        assert in_another_process(lambda key=key: written(folder, key) and None) == 0
    for age, key in enumerate(("new", "old", "used")):
        then = time.time() - 1000 * (age + 1)
        os.utime(tmp_path / f"{key}.weights", (then, then))
    free[0] = 3 << 20
    assert folder.make_room(100_000)
    assert names(tmp_path) == ["new.weights", "used.weights"]
    assert not folder.make_room(50 << 20)
    assert names(tmp_path) == ["used.weights"]
    assert not folder.has_room(50 << 20)
    del in_use


def test_a_file_that_nobody_has_used_for_a_month_goes(tmp_path: Path) -> None:
    folder = WeightsFolder(tmp_path)
    assert in_another_process(lambda: written(folder, "a") and None) == 0
    then = time.time() - 31 * DAY_S
    os.utime(tmp_path / "a.weights", (then, then))
    assert folder.make_room(1)
    assert names(tmp_path) == []


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_to_is_not_believed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    folder = WeightsFolder(tmp_path)
    assert in_another_process(lambda: written(folder, "a") and None) == 0
    (tmp_path / "a.weights").chmod(mode)
    assert isinstance(folder.claim("a"), WeightsDraft)
    assert "others may write to it" in caplog.text


def test_a_link_in_a_files_place_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    folder = WeightsFolder(tmp_path / "cache")
    (tmp_path / "cache" / "a.draft").symlink_to(elsewhere)
    with pytest.raises(OSError):
        folder.claim("a")
    assert elsewhere.read_text() == "mine"
