"""What `baton doctor` finds of each model of a table."""

from cluster.preflight.findings import Verdict
from cluster.preflight.model_checks import check_node
from core.config.cluster_config import load
from core.config.pools import PoolName

POOLS: tuple[PoolName, ...] = ("prefill", "decode")


def test_each_model_of_a_table_is_looked_at() -> None:
    config = load(
        {"models": {"a": "embedded", "b": "/nowhere", "c": {"path": "embedded", "prefill_instances": 0}}}, {}
    )
    found = {each.check: each for each in check_node("n", config, 0, dict.fromkeys("abc", POOLS), {})}
    assert [found[f"model of {name}"].verdict for name in "abc"] == [Verdict.OK, Verdict.FAIL, Verdict.OK]
    memory = [name for name in found if name.startswith("memory")]
    assert memory == ["memory for prefill of a", "memory for decode of a", "memory for decode of c"]
    assert "shared memory" in found


def test_one_model_is_not_named() -> None:
    names = [each.check for each in check_node("n", load({}, {}), 0, {"": POOLS}, {})]
    assert (names[0], names[-2:]) == ("model", ["memory for prefill", "memory for decode"])
