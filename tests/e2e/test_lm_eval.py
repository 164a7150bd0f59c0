"""lm-evaluation-harness finds through /v1/completions what transformers says of the choices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from models.files.hub import resolve
from tests.clients.run_client import install_python
from tests.e2e.cluster_process import ServeProcess
from tests.e2e.reference import last_states, tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.turns(6, number=1)]
TASK = """
task: words
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean}, {metric: acc_norm, aggregation: mean}]
"""
QUESTIONS = [
    ("def add(a, b):\n    return", [" a + b", " import os", " None of the above is what we return here"], 0),
    ("The sun rises in the", [" east", " west", " refrigerator"], 0),
    ("import", [" os", " the", " banana bread"], 0),
    ("for i in range(10):\n    print(", ["i)", "the house", "10 10 10 10"], 0),
    ("Once upon a", [" time", " green", " function"], 0),
    ("if x is None:\n    raise", [" ValueError", " apple", " of"], 0),
]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lm_eval")
    install_python("lm-eval", folder, 300)
    return folder


def evaluate(harness: Path, tasks: Path, *arguments: str) -> tuple[dict[str, float], list[list[float]]]:
    """(metrics, the log-probability of each choice of each question)"""
    out = tasks / arguments[1]
    environment = os.environ | {
        "PYTHONPATH": str(harness),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tasks / "hf"),
    }
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "run",
        *arguments,
        "--tasks",
        "words",
        "--include_path",
        str(tasks),
    ]
    command += ["--output_path", str(out), "--log_samples"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = out.rglob("results_*.json")
    (samples,) = out.rglob("samples_*.jsonl")
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    found.sort(key=lambda sample: sample["doc_id"])
    scores = [[float(answer[0][0]) for answer in sample["resps"]] for sample in found]
    metrics = json.loads(results.read_text())["results"]["words"]
    return {name: metrics[f"{name},none"] for name in ("acc", "acc_norm")}, scores


def of_transformers(question: str, choices: list[str]) -> list[float]:
    """The log-probability of each choice behind the question. What is behind the question's own tokens is the choice's."""
    start = len(tokenizer().encode(question, add_special_tokens=False))
    found: list[float] = []
    for choice in choices:
        ids = tokenizer().encode(question + choice, add_special_tokens=False)
        _, rows = last_states(tuple(ids[:-1]))
        found.append(sum(rows[at - 1, ids[at]].item() for at in range(start, len(ids))))
    return found


def share_right(scores: list[list[float]]) -> float:
    """How often the likeliest choice is the answer."""
    right = [
        max(range(3), key=one.__getitem__) == question[2]
        for one, question in zip(scores, QUESTIONS, strict=True)
    ]
    return sum(right) / len(right)


def test_the_result_is_that_of_transformers(harness: Path, tmp_path: Path) -> None:
    names = ("question", "choices", "answer")
    lines = [json.dumps(dict(zip(names, question, strict=True))) for question in QUESTIONS]
    (tmp_path / "words.jsonl").write_text("\n".join(lines))
    (tmp_path / "words.yaml").write_text(TASK.replace("DATA", str(tmp_path / "words.jsonl")))
    server = ServeProcess("--local", "--set", "model.dtype=float32", log=tmp_path / "serve.log")
    try:
        url = f"base_url={server.base_url}/v1/completions"
        asked = f"model=baton-embedded,{url},tokenizer={resolve('embedded')},num_concurrent=4,max_retries=1"
        metrics, got = evaluate(harness, tmp_path, "--model", "local-completions", "--model_args", asked)
    finally:
        server.stop()
    want = [of_transformers(question, choices) for question, choices, _ in QUESTIONS]
    for mine, theirs in zip(got, want, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-3)
    by_length = [
        [score / len(choice) for score, choice in zip(scores, choices, strict=True)]
        for scores, (_, choices, _) in zip(want, QUESTIONS, strict=True)
    ]
    assert metrics == {
        "acc": pytest.approx(share_right(want)),
        "acc_norm": pytest.approx(share_right(by_length)),
    }
