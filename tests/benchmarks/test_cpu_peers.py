"""What a run beside other engines keeps, and how it is summed up."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.cpu import limits
from benchmarks.cpu.child import Child
from benchmarks.cpu.limits import in_registers, measure_limits, roofline
from benchmarks.cpu.onednn_log import multiplied_by
from benchmarks.cpu.peers import Stamp
from benchmarks.cpu.record import Cell, Record, Setting
from benchmarks.cpu.shapes import SHAPES
from benchmarks.cpu.table import means, show
from kernels.cpu.library import Isa, instruction_sets
from kernels.cpu.linear import Layout

DECODE = Cell("decode", 8)
ABOUT = {"format": "int8", "instructions": "amx"}
LIMITS = {"read_gb_s": 20.0, "float32_gop_s": 100.0, "bfloat16_gop_s": 150.0, "int8_gop_s": 300.0}


def setting(peer: str, bits: int = 16) -> Setting:
    return Setting(peer=peer, shape="0.5b", threads=2, bits=bits)


def taken(wall_s: float, cpu_s: float) -> dict[str, float]:
    return {"tokens": 64, "wall_s": wall_s, "cpu_s": cpu_s}


def test_of_all_rounds_the_least_time_and_the_most_memory_count(tmp_path: Path) -> None:
    record = Record(tmp_path / "found.json", "x", resume=False)
    for wall, cpu, peak in ((2.0, 3.0, 900.0), (1.0, 4.0, 800.0)):
        record.add(setting("baton"), DECODE, ABOUT, taken(wall, cpu))
        record.add(setting("baton"), Cell("memory"), ABOUT, {"peak_mb": peak, "resident_mb": 1.0})
    decode, memory = record.cells()
    assert (decode["tokens_per_s"], decode["tokens_per_cpu_s"]) == (64.0, 21.33)
    assert decode["instructions"] == "amx"
    assert memory["peak_mb"] == 900.0


def test_a_run_goes_on_where_its_file_ends(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    first = Record(path, "x", resume=False)
    first.add(setting("baton"), DECODE, ABOUT, taken(1.0, 1.0))
    first.leave_out("vllm", "no such kernel", bits=4)
    again, anew = Record(path, "x", resume=True), Record(path, "x", resume=False)
    assert again.rounds(setting("baton"), DECODE) == 1
    assert again.left_out(setting("vllm", 4))
    assert not again.left_out(setting("vllm", 8))
    assert anew.rounds(setting("baton"), DECODE) == 0


def test_the_mean_is_taken_over_the_best_peer_of_each_cell() -> None:
    record = Record(None, "x", resume=False)
    for peer, at_8, at_32 in (("baton", 1.0, 1.0), ("one", 2.0, 0.5), ("other", 4.0, 8.0)):
        record.add(setting(peer), DECODE, ABOUT, taken(at_8, 1.0))
        record.add(setting(peer), Cell("decode", 32), ABOUT, taken(at_32, 1.0))
    assert means([*record.cells()], "tokens_per_s") == {16: pytest.approx((2.0 * 0.5) ** 0.5)}


def test_no_engine_passes_the_memory_nor_the_products() -> None:
    shape = SHAPES["0.5b"]
    numbers = shape.layer_numbers + shape.head_numbers
    assert roofline(LIMITS, shape, 16, "decode", 1) == pytest.approx(20e9 / (2 * numbers))
    assert roofline(LIMITS, shape, 4, "decode", 1) == pytest.approx(20e9 / (numbers / 2))
    assert roofline(LIMITS, shape, 16, "decode", 1000) == pytest.approx(150e9 / (2 * numbers))
    assert roofline(LIMITS, shape, 8, "prefill", 1) == pytest.approx(300e9 / (2 * shape.layer_numbers))


def test_the_table_has_each_peers_rate_and_names_what_was_left_out() -> None:
    record = Record(None, "x", resume=False)
    record.add_limits(2, LIMITS)
    record.add(setting("baton"), DECODE, ABOUT, taken(1.0, 1.0))
    record.add(setting("one"), DECODE, ABOUT, taken(2.0, 1.0))
    record.leave_out("other", "it is not to be had")
    out = io.StringIO()
    show(record, out)
    assert "| 16 | decode 8 | 64.0 | 32.0 (2.00) |" in out.getvalue()
    assert "left out: other: it is not to be had" in out.getvalue()


def test_a_prompt_of_any_length_is_measured_when_it_is_no_longer_cold() -> None:
    took = [9.0, 2.0]

    def prefill(prompt: list[int]) -> tuple[Stamp, Stamp]:
        assert len(prompt) == 2048
        return Stamp(0.0, 0.0), Stamp(took.pop(0), 1.0)

    peer: Any = SimpleNamespace(load=lambda *given: SimpleNamespace(engine=SimpleNamespace(prefill=prefill), format="", version="", instructions=""))  # fmt: skip
    child = Child(peer)
    child.load("", "", 16, 1)
    assert child.prefill(tokens=2048)["wall_s"] == 2.0


def test_a_processor_s_tiles_raise_the_limits_and_emulated_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "in_registers", lambda *given: 1e9)
    rates = "bfloat16_gop_s", "int8_gop_s"
    for kind, found in (("processor", True), ("emulated", False), ("none", False)):
        monkeypatch.setattr(limits, "tiles", lambda kind=kind: kind)
        measured = measure_limits(1, smoke=True)
        assert [measured[rate] == 1e9 for rate in rates] == [found, found]
        assert measured["float32_gop_s"] < 1e9


@pytest.mark.skipif(Isa.AMX not in instruction_sets(), reason="tiles need AVX-512 with BF16 beside them")
def test_threads_multiply_in_registers() -> None:
    assert all(in_registers(Isa.AMX, layout, 2, 10) > 0 for layout in (Layout.BFLOAT16, Layout.INT8))


def test_the_log_of_onednn_names_the_kernels_of_products_alone() -> None:
    log = """onednn_verbose,v1,info,cpu,isa:Intel AVX10.1/512 with Intel AMX
onednn_verbose,v1,primitive,create:cache_miss,cpu,matmul,brgemm:avx10_1_512_amx,undef,src:bf16,,,4x8:8x8,0.1
onednn_verbose,v1,primitive,exec,cpu,reorder,jit:uni,undef,src:f32,,,8x8,0.01
onednn_verbose,v1,primitive,exec,cpu,matmul,brgemm:avx512_core,undef,src:f32,,,4x8:8x8,0.1
somebody else's line, exec, cpu, matmul
onednn_verbose,primitive,exec,cpu,inner_product,brgemm:avx10_1_512_amx,forward,src:bf16,,,4x8:8x8,0.1
onednn_verbose,v1,primitive,exec,cpu,matmul,brgemm:avx10_1_512_amx,undef,src:bf16,,,4x8:8x8,0.1
onednn_verbose,v1,primitive,exec,cpu,matmul"""
    assert multiplied_by(log) == "brgemm:avx10_1_512_amx, brgemm:avx512_core"
    assert multiplied_by("nothing") == "unknown"
