"""Takes transformers' caches apart, and puts them together again.

A cache is an object of transformers, or lists and dictionaries of tensors. Whatever its class, its leaves are of four kinds:
tensors that grow by one entry a token, tensors of a fixed size, numbers that count tokens, and all that stays as it is. Three
steps of one sequence show which is which (`plan_of`)."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

Path = tuple[str | int, ...]
_THEIRS: Final = "transformers."
_PLAIN: Final = (int, float, bool, str, bytes, type(None))


class UnknownCache(ValueError):
    """A cache keeps something whose place is not known. The text is the end of a sentence."""


@dataclass(frozen=True, slots=True)
class Growing:
    """A tensor with an entry for each token."""

    path: Path
    axis: int
    shape: tuple[int, ...]
    """The other axes, which are those of one token's entry."""
    most: int
    """How many of the last tokens are read; 0: all."""

    @property
    def numbers(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class Fixed:
    """A state: a tensor of one size."""

    path: Path
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CachePlan:
    """What the leaves of a cache are."""

    growing: tuple[Growing, ...]
    fixed: tuple[Fixed, ...]
    counts: Mapping[Path, int]
    """Numbers that count tokens, by how much they are off."""

    @property
    def state_bytes(self) -> int:
        return sum(aligned(leaf.num_bytes) for leaf in self.fixed)

    @property
    def numbers(self) -> int:
        """The numbers of one token, over all layers."""
        return sum(leaf.numbers for leaf in self.growing)

    @property
    def heads(self) -> tuple[int, int] | None:
        """The heads of each layer, and the most dimensions of one; None where layers differ, or have not a key and a value."""
        shapes = [leaf.shape for leaf in self.growing]
        owners = [leaf.path[:-1] for leaf in self.growing]
        are_pairs = owners[::2] == owners[1::2] and len(set(owners)) * 2 == len(owners)
        if (
            not shapes
            or not are_pairs
            or any(leaf.axis != 2 or len(leaf.shape) != 3 for leaf in self.growing)
        ):
            return None
        if {shape[:2] for shape in shapes} != {shapes[0][:2]} or len({*shapes[::2]}) * len(
            {*shapes[1::2]}
        ) > 1:
            return None
        return shapes[0][1], max(shape[2] for shape in shapes)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8


def leaves_of(cache: Any) -> dict[Path, Any]:
    """Return all leaves by their paths."""
    found: dict[Path, Any] = {}

    def take(path: Path, leaf: Any) -> Any:
        found[path] = leaf
        return leaf

    changed(cache, take)
    return found


def changed(node: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return a copy of a cache in which each leaf is what `change` makes of it."""
    parts = {name: changed(part, change, (*path, name)) for name, part in _parts(node)}
    if isinstance(node, dict):
        return parts
    if isinstance(node, list | tuple):
        return type(node)(parts.values())  # type: ignore[misc]
    if not _is_taken_apart(node):
        return change(path, node)
    twin = copy.copy(node)
    for name, part in parts.items():
        setattr(twin, str(name), part)
    return twin


def plan_of(steps: Sequence[tuple[int, Any]]) -> CachePlan:
    """Return what the leaves are. `steps`: tokens, and the cache behind them, each. Raises UnknownCache."""
    tokens, leaves = [count for count, _ in steps], [leaves_of(cache) for _, cache in steps]
    windows = _windows(steps[-1][1])
    growing: list[Growing] = []
    fixed: list[Fixed] = []
    counts: dict[Path, int] = {}
    for path, last in leaves[-1].items():
        former = [own.get(path) for own in leaves]
        if isinstance(last, Tensor):
            if not all(isinstance(one, Tensor) and one.ndim == last.ndim for one in former):
                raise UnknownCache(f"its cache has {_name(path)} at times only")
            _sort_tensor(path, former, tokens, windows, growing, fixed)
        elif _is_count(last) and len(set(former)) > 1:
            numbers = [int(own or 0) for own in former]
            off = {own - count for own, count in zip(numbers, tokens, strict=True)}
            if len(off) > 1:
                raise UnknownCache(f"its cache counts something else than tokens in {_name(path)}")
            counts[path] = off.pop()
        elif isinstance(last, _PLAIN) and any(one != last for one in former):
            raise UnknownCache(f"its cache has {_name(path)}, which changes from step to step")
    return CachePlan(tuple(growing), tuple(fixed), counts)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _sort_tensor(
    path: Path,
    steps: Sequence[Any],
    tokens: Sequence[int],
    windows: Mapping[Path, int],
    growing: list[Growing],
    fixed: list[Fixed],
) -> None:
    last: Tensor = steps[-1]
    shapes = [tuple(one.shape) for one in steps]
    if len(set(shapes)) == 1:
        if last.numel() and (last.ndim or last.is_floating_point()):
            fixed.append(Fixed(path, last.numel() * last.element_size()))
        return
    axes = [axis for axis in range(last.ndim) if len({shape[axis] for shape in shapes}) > 1]
    lengths = [shape[axes[0]] for shape in shapes]
    if len(axes) > 1 or lengths != list(tokens) or not last.is_floating_point():
        raise UnknownCache(f"its cache grows in {_name(path)} otherwise than by one entry a token")
    axis, most = axes[0], windows.get(path[:-1], 0)
    growing.append(Growing(path, axis, (*shapes[-1][:axis], *shapes[-1][axis + 1 :]), most))


def keep_all(cache: Any) -> Any:
    """Have layers with a window keep all tokens of a step, which otherwise keep the last alone. Returns the cache."""
    for _, layer in _sliding(cache, ()):
        layer.record_past = True
    return cache


def _windows(cache: Any) -> dict[Path, int]:
    """Return how many tokens before its own each layer with a window reads, by the layer's path."""
    return {path: layer.sliding_window - 1 for path, layer in _sliding(cache, ())}


def _sliding(node: Any, path: Path) -> Iterator[tuple[Path, DynamicSlidingWindowLayer]]:
    if isinstance(node, DynamicSlidingWindowLayer):
        yield path, node
        return
    for name, part in _parts(node):
        yield from _sliding(part, (*path, name))


def _parts(node: Any) -> Iterable[tuple[str | int, Any]]:
    """Return what a node of a cache consists of."""
    if isinstance(node, dict):
        return node.items()  # type: ignore[return-value]
    if isinstance(node, list | tuple):
        return enumerate(node)  # type: ignore[arg-type]
    return vars(node).items() if _is_taken_apart(node) else ()


def _is_taken_apart(node: Any) -> bool:
    is_theirs = type(node).__module__.startswith(_THEIRS)
    return is_theirs and hasattr(node, "__dict__") and not hasattr(node, "to_dict")


def _name(path: Path) -> str:
    return ".".join(map(str, path))
