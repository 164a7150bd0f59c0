"""Boxes, arrows and lifelines as SVG. Text is dark on a light sheet, so a picture reads on light and dark pages."""

from html import escape

Point = tuple[float, float]

FILLS = {
    "plain": ("#ffffff", "#6b7280"),
    "ingress": ("#dbeafe", "#2563eb"),
    "scheduler": ("#ede9fe", "#7c3aed"),
    "prefill": ("#ffedd5", "#ea580c"),
    "decode": ("#dcfce7", "#16a34a"),
    "modelled": ("#f3f4f6", "#6b7280"),
    "bad": ("#fee2e2", "#dc2626"),
}
LINES = {
    "mail": 'stroke="#374151" stroke-width="1.5"',
    "kv": 'stroke="#ea580c" stroke-width="5"',
    "weak": 'stroke="#6b7280" stroke-width="1.5" stroke-dasharray="5 4"',
    "life": 'stroke="#9ca3af" stroke-width="1" stroke-dasharray="2 4"',
}
HEAD = (
    '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="9" markerHeight="9" orient="auto"'
    ' markerUnits="userSpaceOnUse"><path d="M0 0L10 5L0 10z" fill="#374151"/></marker>'
    '<marker id="kvhead" viewBox="0 0 10 10" refX="6" refY="5" markerWidth="16" markerHeight="16" orient="auto"'
    ' markerUnits="userSpaceOnUse"><path d="M0 0L10 5L0 10z" fill="#ea580c"/></marker></defs>'
)


class Canvas:
    def __init__(self, width: int, height: int, title: str) -> None:
        self._size, self._title = (width, height), title
        self._shapes: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        title: str,
        *lines: str,
        kind: str = "plain",
        stack: int = 1,
    ) -> None:
        """`stack`: as many boxes behind each other. Lines stand below the title, from the top."""
        fill, stroke = FILLS[kind]
        for depth in reversed(range(stack)):
            self._shapes.append(
                f'<rect x="{x + 5 * depth}" y="{y - 5 * depth}" width="{w}" height="{h}" rx="7" fill="{fill}" '
                f'stroke="{stroke}" stroke-width="1.5"/>'
            )
        top = y + (h - 17 * len(lines)) / 2 + 5
        self.text(x + w / 2, top, title, bold=True, halo=0)
        for number, line in enumerate(lines, 1):
            self.text(x + w / 2, top + 17 * number, line, halo=0)

    def frame(self, x: float, y: float, w: float, h: float, title: str, kind: str = "plain") -> None:
        self._shapes.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="9" fill="none" stroke="{FILLS[kind][1]}" '
            'stroke-width="1.5" stroke-dasharray="6 4"/>'
        )
        self.text(x + 12, y + 20, title, anchor="start", bold=True)

    def text(
        self, x: float, y: float, words: str, anchor: str = "middle", bold: bool = False, halo: int = 3
    ) -> None:
        """`halo`: pixels around the letters that hide the lines behind them."""
        weight = ' font-weight="600"' if bold else ""
        self._shapes.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}"{weight} paint-order="stroke" stroke="#fafaf9" '
            f'stroke-width="{halo}">{escape(words)}</text>'
        )

    def arrow(
        self,
        *points: Point,
        label: str = "",
        at: Point | None = None,
        kind: str = "mail",
        anchor: str = "middle",
    ) -> None:
        """Through all points; the label stands at `at`, or over the middle of the first piece."""
        path = " ".join(f"{'M' if not number else 'L'}{x} {y}" for number, (x, y) in enumerate(points))
        head = "" if kind == "life" else f' marker-end="url(#{"kvhead" if kind == "kv" else "head"})"'
        self._shapes.append(f'<path d="{path}" fill="none" {LINES[kind]}{head}/>')
        if label:
            (x0, y0), (x1, y1) = points[0], points[1]
            x, y = at or ((x0 + x1) / 2, (y0 + y1) / 2 - 6)
            self.text(x, y, label, anchor)

    def svg(self) -> str:
        width, height = self._size
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#111827">'
            f"<title>{escape(self._title)}</title>"
            f'{HEAD}<rect width="{width}" height="{height}" rx="10" fill="#fafaf9" stroke="#d6d3d1"/>'
            + "\n".join(["", *self._shapes])
            + "\n</svg>\n"
        )
