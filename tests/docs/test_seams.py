"""Functions, classes and protocols stay as small as somebody can hold in the head. What is larger is named here, and only shrinks."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = (
    "baton", "cluster", "core", "decode", "device", "engine", "kernels", "kvtransfer", "models", "net", "parallel",
    "prefill", "sim",
)  # fmt: skip
MOST_LINES, MOST_METHODS, MOST_MEMBERS = 40, 20, 10

LONG_FUNCTIONS = {
    "baton/cli/bench.py::bench": 98,
    "baton/cli/simulate.py::simulate": 96,
    "kernels/triton/hopper_latent.py::_latent_kernel": 92,
    "cluster/instance/real_parts.py::_parts": 69,
    "kernels/triton/attention.py::_attention_kernel": 71,
    "kernels/triton/token_sampling.py::_sample_kernel": 70,
    "baton/cli/doctor.py::doctor": 69,
    "cluster/deploy/rank_actors.py::rank_actors": 64,
    "cluster/ingress/telemetry/metrics.py::RequestMetrics.__init__": 64,
    "cluster/instance/instance.py::Instance.__init__": 65,
    "baton/cli/plan.py::plan": 59,
    "cluster/ingress/telemetry/metrics.py::IngressMetrics.__init__": 57,
    "engine/ranks/rank_process.py::_serve": 57,
    "kernels/triton/rope.py::_rope_write_kernel": 56,
    "kernels/triton/latent.py::_latent_kernel": 52,
    "kernels/triton/token_sampling.py::_enough": 51,
    "engine/ranks/start_ranks.py::start_ranks": 46,
    "engine/execution/graphs/warm_up.py::warm_up": 49,
    "kernels/triton/token_sampling.py::_sample": 49,
    "cluster/instance/real_parts.py::remote_parts": 48,
    "engine/execution/graphs/make_graphs.py::make_graphs": 48,
    "kernels/triton/attention.py::_attend_span": 47,
    "models/hf/transformers_model.py::TransformersModel.__init__": 46,
    "cluster/instance/device_access.py::device_access": 45,
    "engine/ranks/process_group.py::ProcessGroup.__init__": 45,
    "kernels/triton/attention_reduce.py::_reduce_kernel": 45,
    "engine/execution/graphs/step_graphs.py::StepGraphs.__init__": 44,
    "kernels/triton/fixed_step.py::TritonFixedStep.__init__": 44,
    "kernels/triton/gemm_four_bit.py::four_bit_product": 42,
    "models/model.py::Model.__init__": 44,
    "kernels/triton/launching.py::_source": 43,
    "cluster/ingress/templates/chat_template.py::ChatTemplate.render": 42,
    "models/formats/packed_words.py::from_words": 41,
}
"""The lines of each function that has more than `MOST_LINES`."""
LARGE_CLASSES = {
    "cluster/scheduler/fleet/roster.py::Roster": 25,
}
"""The public methods and properties of each class that has more than `MOST_METHODS`."""
LARGE_PROTOCOLS = {
    "models/causal_model.py::CausalModel": 13,
    "cluster/ingress/http/http_connection.py::Connection": 12,
}
"""The members of each Protocol that has more than `MOST_MEMBERS`."""


def test_functions_have_at_most_forty_lines() -> None:
    assert_only_shrinks(LONG_FUNCTIONS, {name: _lines(node) for name, node in functions()}, MOST_LINES)


def test_classes_have_at_most_twenty_public_methods() -> None:
    found = {name: len(_methods(node)) for name, node in classes() if not _is_protocol(node)}
    assert_only_shrinks(LARGE_CLASSES, found, MOST_METHODS)


def test_protocols_have_at_most_ten_members() -> None:
    found = {name: len(_members(node)) for name, node in classes() if _is_protocol(node)}
    assert_only_shrinks(LARGE_PROTOCOLS, found, MOST_MEMBERS)


def assert_only_shrinks(known: dict[str, int], found: dict[str, int], most: int) -> None:
    too_large = {name: size for name, size in found.items() if size > most}
    grown = {name: size for name, size in too_large.items() if size > known.get(name, 0)}
    assert not grown, f"more than {most}, or more than before: split them"
    shrunk = {name: too_large.get(name) for name, size in known.items() if too_large.get(name, 0) < size}
    assert not shrunk, "smaller than this file says: write the new figure down, or take the line out"


@cache
def trees() -> tuple[tuple[str, ast.Module], ...]:
    paths = [path for name in PRODUCT for path in sorted((ROOT / name).rglob("*.py"))]
    return tuple((path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())) for path in paths)


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path, tree in trees():
        for name, node in named(tree, path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, node


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path, tree in trees():
        for name, node in named(tree, path):
            if isinstance(node, ast.ClassDef):
                yield name, node


def named(node: ast.AST, within: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield every function and class below `node` with its name: its file's path and the names that it is within."""
    for child in ast.iter_child_nodes(node):
        name = within
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{within}{'::' if within.endswith('.py') else '.'}{child.name}"
            yield name, child
        yield from named(child, name)


def _lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines from the one with `def` to the last."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _methods(node: ast.ClassDef) -> set[str]:
    return {
        part.name
        for part in node.body
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and not part.name.startswith("_")
    }


def _members(node: ast.ClassDef) -> set[str]:
    fields = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
    return _methods(node) | {field.id for field in fields if isinstance(field, ast.Name)}


def _is_protocol(node: ast.ClassDef) -> bool:
    return any("Protocol" in ast.unparse(base) for base in node.bases)
