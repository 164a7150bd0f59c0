"""What `baton doctor` says of a node's memory."""

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.instance import rank_memory
from cluster.preflight.findings import Verdict
from cluster.preflight.memory_check import check_memory
from core.config.cluster_config import load
from engine.sizing.devices import host_memory


def test_each_pool_that_has_instances_is_judged_by_what_its_engine_would_take() -> None:
    both = list(check_memory("n", load(None, {}), ("prefill", "decode")))
    assert [(f.check, f.verdict) for f in both] == [
        ("memory for prefill", Verdict.OK),
        ("memory for decode", Verdict.OK),
    ]
    assert all("tokens of KV" in f.measured for f in both)
    without = load(None, {}, {"prefill_instances": 0})
    assert [f.check for f in check_memory("n", without, ("prefill", "decode"))] == ["memory for decode"]
    assert [f.check for f in check_memory("n", load(None, {}), ("prefill",))] == ["memory for prefill"]


def test_a_node_with_too_little_memory_is_found_with_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    little = replace(host_memory(), free_bytes=1 << 20)
    monkeypatch.setattr(rank_memory, "memory_of", lambda _: little)
    (found,) = check_memory("n", load(None, {}), ("decode",))
    assert found.verdict is Verdict.FAIL
    assert "0.00 GiB, its free memory" in found.measured


def test_without_the_models_folder_nothing_is_judged(tmp_path: Path) -> None:
    gone = load(None, {}, {"model.path": f"{tmp_path}/gone"})
    assert list(check_memory("n", gone, ("prefill", "decode"))) == []
