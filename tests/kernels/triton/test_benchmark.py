"""benchmarks/gpu/kernels.py launches every kernel that there is."""

import ast
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.runtime.interpreter")
from triton.runtime.interpreter import GridExecutor

from benchmarks.gpu.cases import SMOKE
from benchmarks.gpu.kernels import every_case
from tests.kernels.triton.conftest import INTERPRETED

SOURCES = Path(__file__).parents[3] / "kernels" / "triton"


def kernels() -> set[str]:
    """Names of those that are launched: what only kernels call has no such name."""
    trees = (ast.parse(path.read_text()) for path in SOURCES.glob("*.py"))
    functions = (node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef))
    return {one.name for one in functions if one.decorator_list and one.name.endswith("_kernel")}


@pytest.mark.skipif(not INTERPRETED, reason="launches are seen in the interpreter")
def test_it_launches_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()

    def only_seen(self: GridExecutor, *args: object, **kwargs: object) -> None:
        seen.add(self.fn.__name__)

    monkeypatch.setattr(GridExecutor, "__call__", only_seen)
    names = []
    for case in every_case(SMOKE, torch.device("cpu")):
        names.append(case.name)
        case.run()
    assert len(kernels()) > 15
    assert kernels() - seen == set()
    assert len(set(names)) == len(names)
