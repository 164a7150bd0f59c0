"""Writes the table of what each way of storing loses into docs/weights.md, from what `benchmarks.engine.perplexity` has measured.

python -m benchmarks.engine.perplexity_table"""

import json
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
PAGE, RESULT = _ROOT / "docs" / "weights.md", _ROOT / "benchmarks" / "results" / "perplexity.json"
_BEGIN, _END = "<!-- losses -->\n", "<!-- /losses -->\n"


def page(text: str, content: dict[str, Any]) -> str:
    """Return `text` with the table of what was measured."""
    before, _, rest = text.partition(_BEGIN)
    return f"{before}{_BEGIN}{_table(content)}{_END}{rest.partition(_END)[2]}"


def _table(content: dict[str, Any]) -> str:
    rows = [
        "| stored as | bits a weight | loss, nats a token | by its own library | largest logit error | in float32 |",
        "|---|---|---|---|---|---|",
    ]
    for row in content["formats"]:
        library = [""] * 3
        if "library_loss" in row:
            errors = row["max_logit_error"], row["max_logit_error_float32"]
            library = [f"{row['library_loss']:z.4f}", f"{errors[0]:.2f}", f"{errors[1]:.5f}"]
        cells = [row["format"], f"{row['bits']:.4g}", f"{row['loss']:z.4f}", *library]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), json.loads(RESULT.read_text())))
