"""Prefill on two tensor-parallel ranks, decode on one: `python examples/two_meshes.py [--model FOLDER]`.

Each rank is a process. The prefill ranks write their halves of the KV cache into the blocks of the decode instance. Over Ray,
behind HTTP: `baton serve --prefill 1 --prefill-tp 2 --decode 1`."""

import argparse

from baton import LLM, SamplingParams

PROMPT = "import os\n\n\nclass Path"

if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", default="embedded")
    options.add_argument("--prefill-tp", type=int, default=2)
    options.add_argument("--decode-tp", type=int, default=1)
    args = options.parse_args()
    greedy = SamplingParams(temperature=0.0, max_tokens=32)
    with LLM(args.model) as one_rank:
        (expected,) = one_rank.generate(PROMPT, greedy, progress=False)
    with LLM(
        args.model,
        prefill_instances=1,
        decode_instances=1,
        prefill__tp=args.prefill_tp,
        decode__tp=args.decode_tp,
        schedule__local_threshold_tokens=0,  # hand over even a prompt as short as this one
    ) as two_meshes:
        (found,) = two_meshes.generate(PROMPT, greedy, progress=False)
    print(f"{PROMPT}\033[1m{found.text}\033[0m\n")
    print(
        "the same text as on one rank" if found.text == expected.text else f"one rank said {expected.text!r}"
    )
