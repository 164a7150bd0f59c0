"""Three instances of which each prefills and decodes, as the scheduler says: `python examples/any_role.py [--model FOLDER]`.

They share this process here. The same over Ray, behind HTTP: `baton serve --prefill 0 --decode 3 --any-role`."""

import argparse

from baton import LLM, SamplingParams

PROMPTS = [f"def power_of_{number}(x):\n" for number in range(2, 10)]

if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", default="embedded")
    options.add_argument("--instances", type=int, default=3)
    args = options.parse_args()
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    with LLM(args.model) as alone:
        expected = [answer.text for answer in alone.generate(PROMPTS, greedy)]
    with LLM(args.model, any_role=True, prefill_instances=0, decode_instances=args.instances) as fleet:
        found = [answer.text for answer in fleet.generate(PROMPTS, greedy)]
    for prompt, text in zip(PROMPTS, found, strict=True):
        print(f"{prompt}\033[1m{text}\033[0m\n")
    num_equal = sum(a == b for a, b in zip(expected, found, strict=True))
    print(f"{num_equal} of {len(PROMPTS)} answers equal those of one instance")
