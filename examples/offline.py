"""Offline batch inference: `python examples/offline.py`. No server, no Ray; the same engine that the cluster runs."""

from baton import LLM, SamplingParams

PROMPTS = [
    "def fibonacci(n):\n",
    "import os\n\n\nclass Path",
    "# Read a file and count its lines\ndef count_lines(path):\n",
    "for i in range(",
]

if __name__ == "__main__":
    with LLM("embedded") as llm:
        for answer in llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=48)):
            print("=" * 80)
            print(f"{answer.prompt}\033[1m{answer.text}\033[0m")
