"""`baton chat` over a pipe and at a terminal, against an endpoint whose answers are known."""

import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator

import pytest
import typer
from typer.testing import CliRunner

from baton.cli.chat import chat
from core.errors import ConfigError
from tests.baton.openai_fake import Fake, serving
from tests.patience import PATIENCE_S

app = typer.Typer()
app.command()(chat)
ANSWER = "a\u2028\u0085 1 2"


@pytest.fixture
def fake() -> Iterator[Fake]:
    with serving(Fake()) as fake:
        yield fake


def talk(fake: Fake, text: str, *arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["--base-url", fake.url, "--max-tokens", "3", *arguments], input=text)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def roles(body: dict) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in body["messages"]]


def test_a_pipe_gets_an_answer_a_line_and_the_history_grows(fake: Fake) -> None:
    code, out, _ = talk(fake, "hi\n\nthere\n", "--system", "be brief", "--temperature", "0.5")
    assert (code, out) == (0, f"{ANSWER}\n{ANSWER}\n")
    first, second = fake.seen()
    assert roles(first) == [("system", "be brief"), ("user", "hi")]
    assert roles(second) == [*roles(first), ("assistant", ANSWER), ("user", "there")]
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("fake", 0.5, 3)


def test_an_answer_whose_connection_breaks_goes_on_behind_its_last_event() -> None:
    with serving(Fake(breaks_at=2)) as fake:
        code, out, error = talk(fake, "hi\n")
        assert (code, out, error) == (0, f"{ANSWER}\n", "")
        assert len(fake.seen()) == 3
        assert fake.seen()[0] == fake.seen()[2]


def test_commands(fake: Fake) -> None:
    code, out, _ = talk(fake, "hi\n/clear\n/help\nagain\n/exit\nnever\n")
    assert code == 0
    assert "/clear forgets" in out
    assert [roles(body) for body in fake.seen()] == [[("user", "hi")], [("user", "again")]]


def test_a_refused_prompt_is_said_and_forgotten(fake: Fake) -> None:
    code, out, error = talk(fake, "please refuse\nhi\n")
    assert code == 1
    assert error == "error: HTTP 429: too many requests\n"
    assert ANSWER in out
    assert roles(fake.seen()[1]) == [("user", "hi")]


def test_a_dead_endpoint_is_one_line() -> None:
    error = CliRunner().invoke(app, ["--base-url", "http://127.0.0.1:9/v1"]).exception
    assert isinstance(error, ConfigError)
    assert "no OpenAI endpoint answers at http://127.0.0.1:9:" in str(error)


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    with serving(Fake(endless=True)) as fake:
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "baton.cli", "chat", "--base-url", fake.url]
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
                                   preexec_fn=_own_terminal)  # fmt: skip
        os.close(theirs)
        try:
            screen = read_until(ours, "> ")
            assert "fake at http" in screen
            os.write(ours, b"count\n")
            read_until(ours, " 5")
            os.write(ours, b"\x03")
            read_until(ours, "(stopped)")
            os.write(ours, b"/exit\n")
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            process.wait()
            os.close(ours)


def _own_terminal() -> None:
    """Ctrl-C on the terminal reaches the process only if the terminal is its own."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def read_until(terminal: int, wanted: str) -> str:
    seen = ""
    while wanted not in seen:
        assert select.select([terminal], [], [], 30)[0], f"waited for {wanted!r}, got {seen[-500:]!r}"
        seen += os.read(terminal, 4096).decode(errors="replace")
    return seen
