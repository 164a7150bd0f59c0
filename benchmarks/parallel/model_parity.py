"""Which of transformers' causal language models Baton serves with the tokens of `generate`, and why not the others.

    python -m benchmarks.parallel.model_parity [--json FILE] [--page FILE] [--only NAME ...]

Each class gets a tiny random checkpoint, which a prefill instance of one rank and a decode instance of two serve, or of one where
ranks cannot share the layers. `--page` writes the table into a page. Prediction: 85 % or more are the same."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path

from benchmarks.report import parser, write
from tests.models.parity.parity_case import Row, timed
from tests.models.parity.parity_table import with_table
from tests.models.parity.tiny_checkpoints import causal_names

_OF_SMOKE = ("Lfm2ForCausalLM", "GPT2LMHeadModel")


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--only", nargs="+", default=[], metavar="NAME", help="classes to try")
    asked.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks of the decode instance")
    asked.add_argument("--page", type=Path, metavar="FILE", help="a page to write the table into")
    args = asked.parse_args()
    rows: list[Row] = []
    for name in args.only or (_OF_SMOKE if args.smoke else causal_names()):
        row, seconds = timed(name, args.tp)
        rows.append(row)
        print(
            f"{name:34} {row.served_by:13} {row.result:8} tp {row.tp} {seconds:5.1f} s {row.reason}",
            flush=True,
        )
        write(args.json, "benchmarks.parallel.model_parity", {"rows": [asdict(row) for row in rows]})
    counts = Counter(row.result for row in rows)
    print(", ".join(f"{count} {result}" for result, count in counts.most_common()))
    if args.page:
        args.page.write_text(with_table(args.page.read_text(), rows))


if __name__ == "__main__":
    main()
