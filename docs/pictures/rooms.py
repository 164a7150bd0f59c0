"""Draw which rooms of cluster/ and engine/ import which, from the code itself: `python docs/pictures/rooms.py FILE [CHECKOUT]`.

A room is a folder or a module right below a package. It stands above all that it imports, its circles aside."""

import sys
from pathlib import Path

import grimp
from canvas import Canvas

_PACKAGES = ("cluster", "engine")
_WIDTH, _HEIGHT, _GAP = 132, 26, 12
_FLOOR = 84
_PER_ROW = 13


def imports(package: str, checkout: Path) -> dict[str, set[str]]:
    """Return by room the rooms of the same package that it imports."""
    sys.path.insert(0, str(checkout))
    graph = grimp.build_graph(package, cache_dir=None)
    sys.path.remove(str(checkout))
    found: dict[str, set[str]] = {}
    for module in graph.modules - {package}:
        room = module.split(".")[1]
        used = {name.split(".")[1] for name in graph.find_modules_directly_imported_by(module) if "." in name}
        found[room] = found.get(room, set()) | used - {room}
    return found


def floors(arrows: dict[str, set[str]]) -> dict[str, int]:
    """Return by room its floor: one above the highest that it imports. A room met again on the way down counts as the ground."""

    def floor(room: str, above: frozenset[str]) -> int:
        below = arrows[room] - above - {room}
        return 1 + max((floor(other, above | {room}) for other in sorted(below)), default=-1)

    return {room: floor(room, frozenset()) for room in arrows}


def draw(checkout: Path) -> Canvas:
    all_arrows = {package: imports(package, checkout) for package in _PACKAGES}
    rows = [_rows(floors(arrows)) for arrows in all_arrows.values()]
    width = max(len(row) for part in rows for row in part) * (_WIDTH + _GAP) + 40
    height = sum(len(part) for part in rows) * _FLOOR + 60 * len(rows)
    canvas = Canvas(max(width, 460), height, "Rooms of cluster/ and engine/: an arrow is an import")
    top = 20.0
    for (package, arrows), part in zip(all_arrows.items(), rows, strict=True):
        num_arrows = sum(len(used) for used in arrows.values())
        canvas.text(20, top + 12, f"{package}/: {len(arrows)} rooms, {num_arrows} arrows", "start", bold=True)
        _draw_part(canvas, arrows, part, top + 34)
        top += len(part) * _FLOOR + 60
    return canvas


def _rows(floor_of: dict[str, int]) -> list[list[str]]:
    """Return the rows of rooms from the top floor down. A wide floor takes several rows."""
    rows: list[list[str]] = []
    for floor in sorted(set(floor_of.values()), reverse=True):
        here = sorted(room for room in floor_of if floor_of[room] == floor)
        rows += [here[start : start + _PER_ROW] for start in range(0, len(here), _PER_ROW)]
    return rows


def _draw_part(canvas: Canvas, arrows: dict[str, set[str]], rows: list[list[str]], top: float) -> None:
    places = {
        room: (20 + column * (_WIDTH + _GAP), top + number * _FLOOR)
        for number, row in enumerate(rows)
        for column, room in enumerate(row)
    }
    for room, used in sorted(arrows.items()):
        x, y = places[room]
        for other in sorted(used):
            ox, oy = places[other]
            canvas.arrow((x + _WIDTH / 2, y + _HEIGHT), (ox + _WIDTH / 2, oy))
    for room, (x, y) in places.items():
        canvas.box(x, y, _WIDTH, _HEIGHT, room)


if __name__ == "__main__":
    given = [Path(text).resolve() for text in sys.argv[1:]]
    given[0].write_text(draw(given[1] if given[1:] else Path(__file__).parents[2]).svg())
