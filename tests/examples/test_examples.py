"""Each command of examples/README.md runs on the embedded model and prints what it promises."""

import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster_process import ServeProcess
from tests.e2e.reference import greedy_text, tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMANDS = {
    Path(words[1]).name: words[2:]
    for row in re.findall(r"^\|.*\| `(python .*)` \|$", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    for words in [shlex.split(row)]
}
PROMPT = "import os\n\n\nclass Path"
Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run an example as its page says, but for the server's address, and return what it has printed."""

    def run(name: str, url: str = "") -> str:
        path = EXAMPLES / name
        words = [url if url and word.startswith("http") else word for word in COMMANDS[name]]
        monkeypatch.setattr(sys, "argv", [str(path), *words])
        monkeypatch.syspath_prepend(str(EXAMPLES))
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return run


def truth(num_tokens: int) -> str:
    return greedy_text(tuple(tokenizer().encode(PROMPT)), num_tokens)


def test_the_page_names_every_example() -> None:
    assert set(COMMANDS) == {path.name for path in EXAMPLES.glob("*.py")}


def test_no_example_is_longer_than_60_lines() -> None:
    assert max(len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")) <= 60


@pytest.mark.slow
def test_offline_prompts_are_all_answered(run: Run) -> None:
    assert run("offline.py").count("=" * 80) == 4


@pytest.mark.slow
def test_an_answer_has_the_shape_that_was_asked_for(run: Run, server: ServeProcess) -> None:
    assert re.fullmatch(r"(Python|Rust|C\+\+): [1-5] of 5, .*\n", run("structured.py", server.base_url))


@pytest.mark.slow
def test_the_nearest_text_is_the_first(run: Run, server: ServeProcess) -> None:
    lines = run("embeddings.py", server.base_url).splitlines()
    assert [line.split()[1] for line in lines[:1]] == ["def"]
    assert len(lines) == 3


@pytest.mark.slow
def test_each_line_of_a_batch_is_answered(run: Run, server: ServeProcess) -> None:
    lines = run("batch.py", server.base_url).splitlines()
    assert {line.partition(":")[0] for line in lines} == {f"sum {number}" for number in range(20)}


@pytest.mark.slow
def test_a_stream_is_what_transformers_says(run: Run, server: ServeProcess) -> None:
    assert run("stream.py", server.base_url) == truth(64) + "\n"


@pytest.mark.slow
def test_an_agent_whose_model_calls_no_tool_ends_with_its_first_turn(run: Run, server: ServeProcess) -> None:
    said = run("agent.py", server.base_url)
    assert said.startswith("model: ")
    assert "tool " not in said


def call_of(name: str, arguments: str) -> dict[str, Any]:
    call = {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def test_an_agent_is_told_what_its_tools_found(capsys: pytest.CaptureFixture[str]) -> None:
    agent = runpy.run_path(str(EXAMPLES / "agent.py"))
    calls = [call_of("length", '{"text": "baton"}'), call_of("weigh", "{}"), call_of("reverse", '{"tex')]
    turns = iter([*calls, {"role": "assistant", "content": "It is 5."}])
    seen: list[dict[str, Any]] = []

    def chat(messages: list[dict[str, Any]]) -> dict[str, Any]:
        seen.append(messages[-1])
        return next(turns)

    assert agent["run"](chat, "How long is baton?", 8) == "It is 5."
    assert [message["content"] for message in seen] == [
        "How long is baton?",
        "5",
        "there is no tool weigh",
        "the arguments must be an object with a text",
    ]
    assert [message.get("tool_call_id") for message in seen[1:]] == [
        "call_length",
        "call_weigh",
        "call_reverse",
    ]


def test_an_agent_that_never_answers_is_ended() -> None:
    agent = runpy.run_path(str(EXAMPLES / "agent.py"))
    with pytest.raises(SystemExit, match="no answer within 3 turns"):
        agent["run"](lambda _: call_of("reverse", '{"text": "a"}'), "Go on.", 3)


@pytest.mark.slow
def test_an_answer_without_reasoning_is_content_alone(run: Run, server: ServeProcess) -> None:
    said = run("reasoning.py", server.base_url)
    assert said.startswith("\n[content]\n")
    assert "[reasoning]" not in said


@pytest.mark.slow
def test_instances_of_any_role_answer_as_one_does(run: Run) -> None:
    assert "8 of 8 answers equal those of one instance" in run("any_role.py")


@pytest.mark.slow
def test_two_meshes_answer_as_one_rank_does(run: Run) -> None:
    said = run("two_meshes.py")
    assert truth(32) in said
    assert "the same text as on one rank" in said


def test_a_simulated_fleet_keeps_less_of_a_greater_load(run: Run) -> None:
    shares = [float(share) for share in re.findall(r"([\d.]+)% within", run("simulate_trace.py"))]
    for fleet in (shares[:3], shares[3:]):
        assert fleet == sorted(fleet, reverse=True)
        assert fleet[0] > 99.0


def test_the_planned_fleet_is_the_cheapest_that_holds_the_targets(run: Run) -> None:
    *tried, last = run("plan_fleet.py").splitlines()
    found = [re.fullmatch(r"(.*?)([\d.]+) \$/h +([\d.]+)% in time", row) for row in tried]
    rows = [(float(row[2]), float(row[3]), row[1].strip()) for row in found if row]
    assert len(rows) == len(tried)
    price, _, name = min(row for row in rows if row[1] >= 95.0)
    assert last.startswith(f"{name} at ${price:.2f}/h")
