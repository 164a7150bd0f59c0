"""Processes that share a card: `python -m benchmarks.gpu.one_card --json FILE` (one GPU, a minute and a half).

What ADR 100 and ADR 046 rest on. A process opens another one's memory by its CUDA IPC handle, reads what that has
written, and copies it. Steps of 64 sequences of the large model are timed alone, while another process copies within
the card as a memory server does, and while another one computes prompts of 2,048 tokens: with the card to all of them in turn,
and under MPS with 0.6 of the processors for prompts and 0.4 for tokens.

Predicted, before anything was run on a GPU: memory of another process is copied at 0.9 of the rate of one's own. Beside copies a
step takes 1.5 times as long, since these take half of the bandwidth (a hand-over asks for a hundredth of that), and 1.1 times
beside the many short ones. Kernels of two processes take turns: beside prompts a step takes three times as long, and both
together do as much as either would alone (1.0). Under MPS a step of 0.4 of the processors takes 1.2 times as long alone, since
bandwidth bounds it, and 1.5 times beside prompts; both together do 1.3 times what either would do alone with the whole card,
which is what a pair on a card is for.

`TRITON_INTERPRET=1 python -m benchmarks.gpu.one_card --interpret-smoke` runs it once, tiny, without a GPU: its times mean
nothing."""

import contextlib
import os
from collections.abc import Generator
from functools import partial

from benchmarks.gpu.card_process import CardProcess
from benchmarks.gpu.mps_daemon import mps_daemon
from benchmarks.gpu.session import Results, Row, Verdict, begin, parser
from device.mps import bound_processors
from kernels.triton.platform import INTERPRETED

PROMPTS_SHARE, TOKENS_SHARE = 0.6, 0.4
IPC, TURNS, BOUNDED = "memory of another process", "in turns", "under MPS"


@contextlib.contextmanager
def processes(*kinds: str, shares: dict[str, float] | None = None) -> Generator[list[CardProcess]]:
    """Start one of each kind, bounded to their `shares` of the processors."""
    with contextlib.ExitStack() as stack:
        made: list[CardProcess] = []
        for kind in kinds:
            env = os.environ.copy()
            if shares:
                bound_processors(shares[kind], kind, env)
            made.append(stack.enter_context(CardProcess(kind, env)))
        for each in made:
            each.ready()
        yield made


def another_process() -> Row:
    with processes("copies", "opens") as (owner, opener):
        handle = owner.ask("share")
        found = opener.ask("open", **handle)
        return found | {"own_gb_per_s": owner.ask("run")["gb_per_s"]}


def beside(shares: dict[str, float] | None = None) -> Row:
    with processes("tokens", "prompts", "copies", shares=shares) as (tokens, prompts, copies):
        row = {
            "step_ms": tokens.ask("run")["step_ms"],
            "prompt_ms": prompts.ask("run")["prompt_ms"],
            "gb_per_s": copies.ask("run")["gb_per_s"],
        }
        for how in ("run", "short"):
            tokens.tell("run")
            copies.tell(how)
            said, other = tokens.answer(), copies.answer()
            name = "short_copies" if how == "short" else "copies"
            row |= {f"step_ms_beside_{name}": said["step_ms"], f"{name}_gb_per_s_beside": other["gb_per_s"]}
        tokens.tell("run")
        prompts.tell("run")
        said, other = tokens.answer(), prompts.answer()
        return row | {"step_ms_beside_prompts": said["step_ms"], "prompt_ms_beside_steps": other["prompt_ms"]}


def bounded() -> Row:
    with mps_daemon():
        return beside({"tokens": TOKENS_SHARE, "prompts": PROMPTS_SHARE, "copies": 1.0})


def together(rows: dict[str, Row], name: str) -> float:
    """Return what both do beside each other, where the whole card does 1 of either in the same time."""
    alone, row = rows[TURNS], rows[name]
    return (
        alone["step_ms"] / row["step_ms_beside_prompts"] + alone["prompt_ms"] / row["prompt_ms_beside_steps"]
    )


def verdicts(rows: dict[str, Row]) -> list[Verdict]:
    found: list[Verdict] = []
    if IPC in rows:
        found.append(Verdict("bytes of another process alike", rows[IPC]["alike"], 1.0))
        of_own = rows[IPC]["gb_per_s"] / rows[IPC]["own_gb_per_s"]
        found.append(Verdict("copies from another process, of those within one", of_own, 0.9))
    if TURNS in rows:
        row = rows[TURNS]
        slower = row["step_ms_beside_short_copies"] / row["step_ms"]
        found.append(Verdict("a step beside a memory server's short copies", slower, 1.1, at_least=False))
    if TURNS in rows and BOUNDED in rows:
        found.append(Verdict("prompts and tokens on one card, under MPS", together(rows, BOUNDED), 1.1))
        slower = rows[BOUNDED]["step_ms_beside_prompts"] / rows[TURNS]["step_ms"]
        found.append(Verdict("a step beside prompts, under MPS", slower, 1.5, at_least=False))
    return found


def main() -> None:
    args = parser(__doc__).parse_args()
    results = Results(args.json, "benchmarks.gpu.one_card", begin(args.interpret_smoke), verdicts)
    made = {IPC: another_process, TURNS: partial(beside, None)}
    if not INTERPRETED:
        made[BOUNDED] = bounded
    for name in results.missing(made):
        results.make(name, made[name])
    results.end()


if __name__ == "__main__":
    main()
