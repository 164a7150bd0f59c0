"""Which attention is used: the fastest right one, by medians, measured once; what is forced is used or refused."""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ConfigError
from kernels.attention.case import Attend, Backend, Case, kind_of
from kernels.attention.choosing import Chooser
from kernels.attention.fastest import fastest
from kernels.attention.installed import load_backend
from kernels.attention.remembered import ChoiceFile, RememberedChoice
from kernels.attention.selecting import select_attention
from kernels.attention.trial import Lens, device_timer, make_step, run
from kernels.torch.paged_attention import PagedAttention

CPU = torch.device("cpu")
CASE = Case(num_heads=4, num_kv_heads=2, head_dim=8, block_size=4, dtype=torch.float32, scale=0.5)
LENS: Mapping[str, Lens] = {"decode": [(1, 9), (1, 3)], "prefill": [(5, 7), (1, 2)]}


class Slow:
    """The reference, with a pretended duration and a count of its calls."""

    def __init__(self, time_s: float, wrong: float = 0.0, error: Exception | None = None) -> None:
        self.time_s, self._wrong, self._error, self._attend = time_s, wrong, error, PagedAttention()
        self.calls = 0

    def __call__(self, *args: object) -> torch.Tensor:
        self.calls += 1
        if self._error:
            raise self._error
        return self._attend(*args) + self._wrong  # type: ignore[arg-type]


class Clock:
    """Times a call by what the backend that it reaches pretends."""

    def __init__(self, *backends: Slow) -> None:
        self._backends = backends

    def __call__(self, call: Callable[[], object]) -> float:
        before = [backend.calls for backend in self._backends]
        call()
        ran = [b for b, n in zip(self._backends, before, strict=True) if b.calls > n]
        assert len(ran) == 1
        return ran[0].time_s


def chooser(path: Path, *backends: Slow, about: str = "a GPU, torch 1") -> Chooser:
    return Chooser(CPU, about, ChoiceFile(path / "choices.json"), Clock(*backends), LENS)  # type: ignore[arg-type]


def used(attend: Attend, lens: Lens, *backends: Slow) -> list[int]:
    """Which of `backends` serve a step."""
    step = make_step(CASE, lens, CPU)
    before = [backend.calls for backend in backends]
    run(attend, step, CASE)
    return [i for i, backend in enumerate(backends) if backend.calls > before[i]]


@pytest.mark.parametrize(
    ("current_s", "other_s", "winner"), [(1.0, 0.98, 0), (1.0, 0.96, 1), (1.0, 1.0, 0), (1.0, 2.0, 0)]
)
def test_another_must_be_three_percent_faster(
    tmp_path: Path, current_s: float, other_s: float, winner: int
) -> None:
    ours, theirs = Slow(current_s), Slow(other_s)
    choose = chooser(tmp_path, ours, theirs)
    attend = choose.choose([CASE], Backend("ours", ours), [Backend("theirs", theirs)])
    for lens in LENS.values():
        assert used(attend, lens, ours, theirs) == [winner]


times = st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=9)


@given(st.dictionaries(st.sampled_from("abcd"), times, min_size=1), st.sampled_from("abcd"))
def test_nothing_is_chosen_that_a_median_beats_by_three_percent(
    timings_s: dict[str, list[float]], current: str
) -> None:
    medians = {
        name: sorted(t)[len(t) // 2] / 2 + sorted(t)[(len(t) - 1) // 2] / 2 for name, t in timings_s.items()
    }
    chosen, best = fastest(timings_s, current), min(medians.values())
    assert 0.97 * medians[chosen] <= best * (1 + 1e-12)
    if chosen != current:
        assert medians[chosen] == pytest.approx(best)


def test_one_outlier_decides_nothing() -> None:
    assert fastest({"a": [1.0, 1.0, 9.0], "b": [1.1, 0.1, 1.1]}, "a") == "a"


@pytest.mark.parametrize(
    "broken", [{"wrong": 0.1}, {"wrong": float("nan")}, {"error": RuntimeError("no nvcc")}]
)
def test_who_is_wrong_or_fails_is_not_used_however_fast(
    tmp_path: Path, broken: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = Slow(1.0), Slow(0.1, **broken)  # type: ignore[arg-type]
    attend = chooser(tmp_path, ours, theirs).choose(
        [CASE], Backend("ours", ours), [Backend("theirs", theirs)]
    )
    assert used(attend, LENS["decode"], ours, theirs) == [0]
    assert "by theirs is not used" in caplog.text


def test_who_reads_what_no_sequence_wrote_is_wrong() -> None:
    step = make_step(CASE, LENS["decode"], CPU)
    assert step.kv_layer.isnan().any()
    assert not run(PagedAttention(), step, CASE).isnan().any()


def test_a_choice_is_remembered_until_something_else_computes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = Slow(1.0), Slow(0.5)
    backends = Backend("ours", ours), [Backend("theirs", theirs)]
    with caplog.at_level(logging.INFO):
        chooser(tmp_path, ours, theirs).choose([CASE], *backends)
        assert "theirs (measured: ours 1000000.0 µs, theirs 500000.0 µs)" in caplog.text
        measured = theirs.calls
        attend = chooser(tmp_path, ours, theirs).choose([CASE], *backends)
    assert theirs.calls == measured
    assert "theirs (remembered: ours 1000000.0 µs, theirs 500000.0 µs)" in caplog.text
    assert used(attend, LENS["prefill"], ours, theirs) == [1]
    measured = theirs.calls
    chooser(tmp_path, ours, theirs, about="a GPU, torch 2").choose([CASE], *backends)
    assert theirs.calls > measured


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"format": "other", "choices": {}}', b"[]"])
def test_a_damaged_file_is_ignored_with_a_line_and_replaced(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "choices.json"
    path.write_bytes(content)
    file = ChoiceFile(path)
    assert file.find("key") is None
    file.add("key", RememberedChoice(backend="b", medians_us={"b": 1.5}))
    assert len(caplog.records) == 1
    assert file.find("key") == RememberedChoice(backend="b", medians_us={"b": 1.5})
    assert json.loads(path.read_text())["choices"]["key"]["backend"] == "b"
    assert list(tmp_path.iterdir()) == [path]


def test_where_nothing_can_be_written_choices_still_work(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    ChoiceFile(tmp_path / "file" / "choices.json").add("key", RememberedChoice(backend="b", medians_us={}))
    assert "not kept" in caplog.text


def test_windows_and_kinds_are_chosen_apart(tmp_path: Path) -> None:
    ours, theirs = Slow(1.0), Slow(0.5)
    narrow = Case(
        num_heads=4, num_kv_heads=2, head_dim=8, block_size=4, dtype=torch.float32, scale=0.5, window=3
    )
    only_whole = Backend("theirs", theirs, lambda case: "no windows" if case.window else "")
    attend = chooser(tmp_path, ours, theirs).choose([CASE, narrow], Backend("ours", ours), [only_whole])
    step = make_step(CASE, LENS["decode"], CPU)
    before = ours.calls, theirs.calls
    attend(step.q, step.kv_layer, step.meta, 0.5, 0, 0.0, None)
    assert (ours.calls, theirs.calls) == (before[0], before[1] + 1)
    attend(step.q, step.kv_layer, step.meta, 0.5, 3, 0.0, None)
    assert (ours.calls, theirs.calls) == (before[0] + 1, before[1] + 1)


def test_what_is_forced_is_used_or_refused(tmp_path: Path) -> None:
    ours, slow, wrong = Slow(1.0), Slow(9.0), Slow(0.1, wrong=0.1)
    current = Backend("triton", ours)

    def force(backend: Backend | None, cases: list[Case]) -> Attend:
        return select_attention("flashinfer", cases, current, chooser(tmp_path), lambda _: backend)

    assert used(force(Backend("flashinfer", slow), [CASE]), LENS["prefill"], ours, slow) == [1]
    refusals: list[tuple[Backend | None, list[Case], str]] = [
        (None, [CASE], "not installed: pip install flashinfer-python"),
        (
            Backend("flashinfer", slow, lambda _: "it has no such heads"),
            [CASE],
            "it has no such heads; use auto",
        ),
        (Backend("flashinfer", wrong), [CASE], "its result is not the reference's; use auto"),
        (Backend("flashinfer", slow), [], "no latent attention"),
    ]
    for backend, cases, why in refusals:
        with pytest.raises(ConfigError, match=why):
            force(backend, cases)


def test_auto_takes_others_only_where_they_are_installed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = Slow(1.0), Slow(0.5)
    current, choose = Backend("triton", ours), chooser(tmp_path, ours, theirs)
    found: dict[str, Backend] = {}
    assert select_attention("auto", [CASE], current, choose, found.get) is ours
    assert ours.calls == 0
    found["flash_attention"] = Backend("flash_attention", theirs)
    assert used(
        select_attention("auto", [CASE], current, choose, found.get), LENS["decode"], ours, theirs
    ) == [1]
    assert select_attention("triton", [CASE], current, choose, found.get) is ours
    assert select_attention("auto", [], current, choose, found.get) is ours

    def broken(name: str) -> Backend | None:
        raise ConfigError(f"{name} is built for another torch")

    assert select_attention("auto", [CASE], current, choose, broken) is ours
    assert "flashinfer is built for another torch" in caplog.text


def test_a_library_that_cannot_be_imported_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol')")
    with pytest.raises(
        ConfigError, match="flash_attn is installed and cannot be imported .*undefined symbol"
    ):
        load_backend("flash_attention")


def test_the_timer_is_of_one_call() -> None:
    calls: list[int] = []
    assert 0 <= device_timer(CPU)(lambda: calls.append(1)) < 1
    assert len(calls) > 1


def test_a_step_of_single_tokens_is_decode_and_any_other_prefill() -> None:
    assert kind_of(make_step(CASE, [(1, 3), (2, 4)], CPU).meta) == "prefill"
    assert kind_of(make_step(CASE, [(1, 3), (1, 4)], CPU).meta) == "decode"
