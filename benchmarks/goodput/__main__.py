"""What schedulers serve within their targets, and what that costs, all of it simulated.

    python -m benchmarks.goodput WHAT [OPTIONS]

`--help` behind a WHAT says what it measures, and what was predicted."""

import ast
import sys
from importlib import import_module
from pathlib import Path

STUDIES = (
    "known",
    "wide",
    "arrivals",
    "rates",
    "sure",
    "fairness",
    "load_balance",
    "shortlists",
    "links",
    "batches",
    "plan_questions",
    "tier_placement",
    "ablate",
)


def main() -> None:
    """Run the study that the command line names. Ends the process where it names none."""
    if len(sys.argv) < 2 or sys.argv[1] not in STUDIES:
        sys.exit("\n".join([str(__doc__), "", *(f"    {name:16} {_about(name)}" for name in STUDIES)]))
    name = sys.argv.pop(1)
    sys.argv[0] = f"python -m benchmarks.goodput {name}"
    import_module(f"benchmarks.goodput.{name}").main()


def _about(name: str) -> str:
    text = ast.get_docstring(ast.parse((Path(__file__).parent / f"{name}.py").read_text()))
    return str(text).partition("\n")[0]


if __name__ == "__main__":
    main()
