"""Verdicts over measurements, on a made-up machine."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from cluster.preflight.findings import Verdict, judge_clock, judge_links
from cluster.preflight.node_checks import check_host


def verdicts(links: dict[str, float], expected: float = 0.0) -> dict[str, Verdict]:
    return {f.where: f.verdict for f in judge_links("send/recv", links, expected, "fix it")}


def test_the_one_slow_link_is_named() -> None:
    links = {"a -> b": 10e9, "b -> a": 9.9e9, "a -> c": 10.1e9, "c -> a": 0.02e9}
    assert verdicts(links) == {
        "a -> b": Verdict.OK,
        "b -> a": Verdict.OK,
        "a -> c": Verdict.OK,
        "c -> a": Verdict.FAIL,
    }


def test_all_links_slow_shows_only_against_an_expectation() -> None:
    links = {"a -> b": 1e9, "b -> a": 1e9}
    assert set(verdicts(links).values()) == {Verdict.OK}
    assert set(verdicts(links, 50e9).values()) == {Verdict.FAIL}


@given(st.floats(-1, 1), st.floats(0, 0.5))
def test_a_clock_is_blamed_only_when_it_must_be_off(skew_s: float, uncertainty_s: float) -> None:
    off = judge_clock("n", skew_s, uncertainty_s).verdict is Verdict.WARN
    assert off == (abs(skew_s) - uncertainty_s > 0.05)


def test_a_down_port_and_too_little_shared_memory_are_found_and_the_fix_is_said(tmp_path: Path) -> None:
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("1: DOWN\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (tmp_path / "dev/shm").mkdir(parents=True)
    found = {f.check: f for f in check_host("n", 1 << 60, "embedded", tmp_path)}
    assert found["RDMA mlx5_0 port 1"].verdict is Verdict.FAIL
    assert found["shared memory"].verdict is Verdict.FAIL
    assert all(f.fix for f in found.values() if f.verdict in (Verdict.FAIL, Verdict.WARN))
    (port / "state").write_text("4: ACTIVE\n")
    found = {f.check: f for f in check_host("n", 1, "embedded", tmp_path)}
    assert found["RDMA mlx5_0 port 1"].verdict is Verdict.OK
    assert found["shared memory"].verdict is Verdict.OK


def test_a_model_that_a_node_has_not_got_is_named_and_the_hub_is_not_asked(tmp_path: Path) -> None:
    def model(path: str) -> tuple[Verdict, str]:
        (found,) = [f for f in check_host("n", 1, path) if f.check == "model"]
        return found.verdict, found.measured

    assert model(str(tmp_path)) == (Verdict.OK, str(tmp_path))
    assert model("nobody/has-this")[0] is Verdict.SKIP
    verdict, measured = model(f"{tmp_path}/gone")
    assert verdict is Verdict.FAIL
    assert f"{tmp_path}/gone" in measured
