"""What the stage that runs tests says of them, also of those that cannot be imported, and before all are over."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")
from benchmarks.gpu import device_tests

TESTS = """
import pytest

def test_good(): ...

def test_bad():
    raise ValueError("wrong here")

@pytest.mark.skip
def test_other(): ...
"""


def test_each_outcome_is_told_and_one_file_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_broken.py").write_text("import no_such_module")
    monkeypatch.setattr(device_tests, "LOOK_S", 0.05)
    heard = list[str]()
    row = device_tests.run(
        ["-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)], heard.append
    )
    assert (row["passed"], row["skipped"], row["exit_code"]) == (1, 1, 1)
    whys = {name.rpartition("/")[2]: why for name, why in row["failed"].items()}
    assert set(whys) == {"test_some.py::test_bad", "test_broken.py"}
    assert "no_such_module" in whys["test_broken.py"]
    assert heard
    assert heard[0].startswith("cut: 0 passed")
    assert [one.met for one in device_tests.verdicts({"some": row})] == [True, False]
