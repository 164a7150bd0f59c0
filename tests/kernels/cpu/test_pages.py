"""Memory on large pages, of matrices and of results."""

import mmap
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.pages import give_back_freed, large_pages, result

MADVISED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
STATUS = Path("/proc/self/status")


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, (2 << 20) - 1, 2 << 20, (5 << 20) + 3])
def test_memory_of_any_size_can_be_written(num_bytes: int) -> None:
    memory = large_pages(num_bytes)
    assert (memory.dtype, len(memory)) == (torch.uint8, num_bytes)
    assert int(memory.fill_(3).long().sum()) == 3 * num_bytes


@pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE") or not MADVISED.exists() or "[never]" in MADVISED.read_text(),
    reason="this system has no large pages",
)
def test_the_system_is_asked_for_large_pages() -> None:
    memory = large_pages(8 << 20)
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        start, _, end = line.split(" ")[0].partition("-")
        if end and int(start, 16) <= memory.data_ptr() < int(end, 16):
            break
    flags = next(line for line in lines if line.startswith("VmFlags"))
    assert "hg" in flags.split()


def test_memory_of_a_large_result_is_taken_again_when_nothing_uses_it() -> None:
    def take() -> None:
        first = result(512, 1024)
        at, view = first.data_ptr(), first[3:5]
        del first
        another = result(512, 1024)
        assert another.data_ptr() != at
        view.fill_(7.0)
        del view
        again = result(400, 1024)
        assert again.data_ptr() == at
        assert (again.shape, again.dtype, again.is_contiguous()) == ((400, 1024), torch.float32, True)

    with ThreadPoolExecutor(1) as thread:  # which has no buffers yet
        thread.submit(take).result()


@given(st.lists(st.tuples(st.integers(1, 700), st.booleans()), max_size=60))
@settings(max_examples=15)
def test_no_two_results_in_use_share_memory(taken: list[tuple[int, bool]]) -> None:
    held: list[tuple[torch.Tensor, float]] = []
    for number, (rows, is_kept) in enumerate(taken):
        made = result(rows, 1024)
        made.fill_(float(number))
        if is_kept:
            held.append((made[rows // 2 :], float(number)))
        if len(held) > 5:
            held.pop(number % 5)
        assert all(bool((each == value).all()) for each, value in held)


def test_threads_have_results_of_their_own() -> None:
    def addresses() -> set[int]:
        return {result(512, 1024).data_ptr() for _ in range(3)}

    with ThreadPoolExecutor(1) as other:
        own, theirs = addresses(), other.submit(addresses).result()
    assert not own & theirs


def resident() -> int:
    (line,) = (one for one in STATUS.read_text().splitlines() if one.startswith("VmRSS"))
    return 1024 * int(line.split()[1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="there is no glibc here")
def test_memory_that_is_free_between_what_is_used_is_given_back() -> None:
    # 64 MB, in pieces for which the C library asks for no mappings of their own
    pieces = [torch.ones(8 << 10) for _ in range(2000)]
    used = pieces[::100]
    del pieces
    before = resident()
    give_back_freed()
    assert resident() < before - (32 << 20)
    assert all(piece.sum() == 8 << 10 for piece in used)
