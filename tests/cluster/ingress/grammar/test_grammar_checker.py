"""Grammars are compiled in a process apart, which may die at any time."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from llguidance import LLMatcher
from pydantic import ValidationError

from cluster.ingress.bodies.structured import StructuredOutputs, schema_grammar, structured_grammar
from cluster.ingress.grammar.grammar_checker import GrammarChecker
from core.errors import ReplicaLost, RequestError
from engine.execution.sampling.grammar_matcher import load_vocabulary
from models.files.hub import resolve
from models.text.tokenizer import load_tokenizer
from tests.processes import command

FOLDER, VOCAB, DEADLINE_S = resolve("embedded"), 4096, 60.0
MODULE = "cluster.ingress.grammar.grammar_process"
WORDS = 'start: "yes" | "no"'
DEEP = "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1} | "b"' for i in range(3000)) + '\nr3000: "c"'
"""It overflows the compiler's stack."""


def optional_members(count: int) -> str:
    return schema_grammar({"type": "object", "properties": {f"p{i}": {} for i in range(count)}})


def branches(count: int) -> str:
    return schema_grammar({"anyOf": [{"properties": {f"k{i}": {"type": "integer"}}} for i in range(count)]})


@pytest.fixture
def checker() -> GrammarChecker:
    return GrammarChecker(FOLDER, VOCAB)


@pytest.fixture
def started() -> Callable[[], set[psutil.Process]]:
    """The processes that this test has started."""
    others = processes()
    return lambda: processes() - others


def processes(of: int | None = None) -> set[psutil.Process]:
    """The one that reads the tokenizer, and the one that compiles."""
    found = psutil.Process(of).children(recursive=True)
    return {process for process in found if MODULE in command(process)}


async def refused(checker: GrammarChecker, grammar: str) -> str:
    with pytest.raises(RequestError) as refusal:
        await checker.check(grammar, "response_format")
    assert refusal.value.status == 400
    return refusal.value.message


async def test_as_many_choices_can_be_followed_as_the_field_takes(checker: GrammarChecker) -> None:
    words = [f"w{number}" for number in range(10_000)]
    asked = StructuredOutputs(choice=words)
    await checker.check(structured_grammar(asked), "structured_outputs")
    with pytest.raises(ValidationError, match="at most 10000 items"):
        StructuredOutputs(choice=[*words, "w"])


@pytest.mark.parametrize("words", [["a", "ab", "abc"], ['a\n"b\\', "é", "<b>"], [" a", "a ", "a"]])
def test_each_choice_is_all_of_the_answer(words: list[str]) -> None:
    tokenizer = load_tokenizer(FOLDER)
    vocabulary = load_vocabulary(FOLDER, VOCAB)
    for text in [*words, "", "b", words[0] + words[1], words[0][:-1] + "x"]:
        matcher = LLMatcher(vocabulary, structured_grammar(StructuredOutputs(choice=words)), log_level=0)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        follows = matcher.consume_tokens(tokens) and matcher.is_accepting()
        assert follows is (text in words), text


async def test_a_grammar_that_is_too_wide_says_what_to_change(checker: GrammarChecker) -> None:
    complaint = await refused(checker, optional_members(1000))
    assert "at one place, and 2000 are the limit" in complaint
    assert "require some" in complaint


async def test_no_process_is_started_before_there_is_a_grammar(
    checker: GrammarChecker, started: Callable[[], set[psutil.Process]]
) -> None:
    assert not started()
    await checker.check(WORDS, "response_format")
    assert len(started()) == 2


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (DEEP, "nests too deeply"),
        (branches(2500), "s of a processor to compile"),
        (optional_members(600), "at one place"),
        ("start: nothing", "nothing"),
    ],
)
async def test_a_bomb_is_refused_by_name_and_the_next_grammar_is_followed(
    checker: GrammarChecker, grammar: str, says: str
) -> None:
    assert says in await refused(checker, grammar)
    await checker.check(WORDS, "response_format")
    await checker.check(optional_members(5) + " " * (20 << 10), "response_format")  # large ones go apart
    assert says in await refused(checker, grammar)


@pytest.mark.parametrize("which", [min, max])
async def test_a_process_that_is_killed_is_replaced(
    checker: GrammarChecker, which: Callable[..., psutil.Process], started: Callable[[], set[psutil.Process]]
) -> None:
    await checker.check(WORDS, "response_format")
    killed = which(started(), key=lambda process: process.pid)
    killed.kill()
    await asyncio.to_thread(killed.wait, DEADLINE_S)
    assert "nothing" in await refused(checker, "start: nothing")
    await checker.check('start: "other"', "response_format")  # answers are not mistaken for one another
    assert "later" in await refused(checker, "start: later")


async def test_a_stopped_client_does_not_confuse_the_answers(checker: GrammarChecker) -> None:
    left = asyncio.create_task(checker.check(optional_members(600), "response_format"))
    await asyncio.sleep(0)
    left.cancel()
    both = await asyncio.gather(refused(checker, "start: nothing"), refused(checker, "start: later"))
    assert "nothing" in both[0]
    assert "later" in both[1]


async def test_where_no_process_can_run_it_is_the_servers_fault(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ReplicaLost, match="has died twice"):
        await checker.check(WORDS, "response_format")
    monkeypatch.undo()
    await checker.check(WORDS, "response_format")


async def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert "tokenizer.json" in await refused(GrammarChecker(tmp_path, VOCAB), WORDS)


INGRESS = f"""
import asyncio, sys
from pathlib import Path
from cluster.ingress.grammar.grammar_checker import GrammarChecker
checker = GrammarChecker(Path({str(FOLDER)!r}), {VOCAB})
asyncio.run(checker.check('start: "a"', "response_format"))
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_the_processes_end_with_the_ingress(how: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INGRESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as ingress:
        assert ingress.stdout is not None
        assert ingress.stdout.readline() == "\n"
        children = processes(ingress.pid)
        assert len(children) == 2
        ingress.send_signal(how)
        ingress.wait(DEADLINE_S)
    _, alive = psutil.wait_procs(list(children), DEADLINE_S)
    assert not alive
