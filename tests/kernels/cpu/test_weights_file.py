"""Files of packed matrices: what is mapped is what was written, or nothing."""

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu.pages import large_pages, taken_from
from kernels.cpu.weights_file import DamagedFile, KeptArena, MappedFile, OpenFile, Piece


def opened(path: Path) -> OpenFile:
    return OpenFile(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))


def filled(arena: KeptArena, sizes: list[int]) -> tuple[list[Tensor], list[dict[str, object]]]:
    """Tensors in the arena, and what an index says of them."""
    made: list[Tensor] = []
    entries: list[dict[str, object]] = []
    for number, size in enumerate(sizes):
        with taken_from(arena):
            tensor = large_pages(size)
        tensor.copy_(torch.arange(size).add(number).to(torch.uint8))
        piece = arena.kept(tensor)
        assert piece is not None
        made.append(tensor)
        entries.append({"number": number, "piece": (piece.mapping, piece.at, piece.num_bytes)})
    return made, entries


def mappings_of(address: int) -> str:
    """The line of /proc/self/maps that an address belongs to."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split(" ")[0].partition("-")
        if int(start, 16) <= address < int(end, 16):
            return line
    raise AssertionError(f"{address} is not mapped")


@given(sizes=st.lists(st.sampled_from([1, 63, 4096, 70_000, 3 << 20]), min_size=1, max_size=6))
@settings(max_examples=8, deadline=None)
def test_matrices_stay_where_they_are_and_are_those_that_another_maps(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    path = tmp_path_factory.mktemp("weights") / "file"
    arena = KeptArena()
    made, entries = filled(arena, sizes)
    wanted = [tensor.clone() for tensor in made]
    arena.become(opened(path), entries)
    read = MappedFile(opened(path))
    assert [entry["number"] for entry in read.entries] == list(range(len(sizes)))
    for tensor, entry, content in zip(made, read.entries, wanted, strict=True):
        other = read.tensor(Piece(*entry["piece"]))
        assert torch.equal(tensor, content)
        assert torch.equal(other, content)
        for at in (tensor, other):
            line = mappings_of(at.data_ptr())
            assert str(path) in line
            assert line.split()[1].startswith("r--s"), "it is shared, and nobody can write to it"


def test_what_is_elsewhere_is_copied_into_the_arena() -> None:
    arena = KeptArena()
    table = torch.randn(5, 7, dtype=torch.float32)
    assert arena.kept(table) is None
    copied = arena.copied(table)
    assert arena.kept(copied) is not None
    assert torch.equal(copied.view(torch.float32).view(5, 7), table)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_a_file_with_a_wrong_byte_or_without_its_end_is_not_believed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("weights") / "file"
    arena = KeptArena()
    _, entries = filled(arena, [100_000, 5000])
    arena.become(opened(path), entries)
    content, start = path.read_bytes(), 2 << 20
    places = st.one_of(
        st.integers(0, 27), st.integers(start, start + 104_000), st.integers(4 << 20, len(content) - 1)
    )
    at = data.draw(places)
    if data.draw(st.booleans()):
        os.truncate(path, at)
    else:
        file = opened(path)
        os.pwrite(file.descriptor, bytes([content[at] ^ data.draw(st.integers(1, 255))]), at)
    with pytest.raises((DamagedFile, OSError)):
        MappedFile(opened(path))


def test_a_full_disk_is_noticed_before_anything_is_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, f"no room for {length} bytes at {offset} of {descriptor}")

    arena = KeptArena()
    made, entries = filled(arena, [100_000])
    before = made[0].clone()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no room"):
        arena.become(opened(tmp_path / "file"), entries)
    assert torch.equal(made[0], before)
    made[0].fill_(1)
