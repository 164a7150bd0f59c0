"""Compiles clients' grammars apart from the ingress: `python -m cluster.ingress.grammar.grammar_process FD FOLDER VOCAB
NICENESS`.

A large tokenizer holds the interpreter's lock for a second or more while it is read, and some grammars overflow llguidance's
stack, which ends the process. So one process reads the tokenizer and forks another one that compiles. When that has died, or
the kernel has ended it at a limit, the first says so and forks the next, which has the tokenizer at once.

It reads `[number, grammar]` in msgpack from the socket FD and answers each with `[number, complaint]` (empty where the grammar
can be followed), or with the number of the signal that ended the process over it. Both processes end with the ingress: the
kernel kills them when their parent has died, and so does the end of the socket's stream."""

import os
import resource
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import cast

import msgpack
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from core.parent_death import die_with_parent
from models.text.grammar_vocabulary import load_vocabulary

PROCESSOR_S = 0.5
"""The processor time that a grammar may take. Dropping what it has compiled to stops a rank's threads for a hundredth of it."""
MORE_BYTES = 1 << 30
"""The memory that grammars may take, beside the tokenizer's."""
_STACK_BYTES = 1 << 20
"""Less than a rank's threads have, so that what can be compiled here can be compiled there."""
_NUM_STEPS = 8
"""How far a grammar is followed: the bounds on one mask's work show behind the first tokens."""
_NO_TOKEN = "NoExtension"
"""How llguidance calls the error of a matcher that allows no token."""
_LIMITS = LLParserLimits(verbose_errors=False)


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal
    descriptor, folder, vocab_size, niceness = sys.argv[1:]
    os.nice(int(niceness))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sock = socket.socket(fileno=int(descriptor))
    vocabulary = _vocabulary(Path(folder), int(vocab_size))
    with suppress(OSError):  # the ingress has ended
        while (code := _run_in_child(sock, vocabulary)) < 0:
            _say(sock, -code)


def _vocabulary(folder: Path, vocab_size: int) -> LLTokenizer | str:
    """Return the checkpoint's tokens, or why there are none."""
    try:
        return load_vocabulary(folder, vocab_size, makes_many=False)
    except ValueError as error:
        return str(error)


def _run_in_child(sock: socket.socket, vocabulary: LLTokenizer | str) -> int:
    """Answer grammars in a child process. Returns its exit code, below 0 for a signal, when it has ended."""
    child = os.fork()
    if child == 0:
        die_with_parent()
        threading.stack_size(_STACK_BYTES)
        thread = threading.Thread(target=_answer, args=(sock, vocabulary))
        thread.start()
        thread.join()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _answer(sock: socket.socket, vocabulary: LLTokenizer | str) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE_BYTES, used + MORE_BYTES))
    with suppress(OSError):  # the ingress has ended
        for number, grammar in msgpack.Unpacker(sock.makefile("rb", buffering=0)):
            signal.setitimer(signal.ITIMER_PROF, PROCESSOR_S)  # SIGPROF ends the process
            complaint = vocabulary if isinstance(vocabulary, str) else _complaint(vocabulary, grammar)
            signal.setitimer(signal.ITIMER_PROF, 0)
            _say(sock, [number, complaint])


def _complaint(vocabulary: LLTokenizer, grammar: str) -> str:
    """Compile a grammar and follow it through some tokens. Returns what is wrong with it; empty where nothing is."""
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)
    followed = list[int]()
    while len(followed) < _NUM_STEPS and not matcher.is_stopped():
        token = _allowed_token(matcher.compute_bitmask(), len(followed))
        if token is None:
            break
        followed.append(token)
        matcher.consume_token(token)
    error = matcher.get_error().partition("\n")[0]
    is_dead = error.startswith(_NO_TOKEN)
    if not is_dead and (error or len(followed) == _NUM_STEPS or matcher.is_accepting()):
        return error
    where = f"after {vocabulary.decode_str(followed)!r}" if followed else "at its beginning"
    return f"the grammar cannot be completed: no token of this model goes on with it {where}"


def _allowed_token(bits: bytes, step: int) -> int | None:
    """Return a token of the mask `bits`, another one in each step; None where it has none."""
    for start in (len(bits) * step // _NUM_STEPS, 0):
        if rest := bits[start:].lstrip(b"\0"):
            return 8 * (len(bits) - len(rest)) + (rest[0] & -rest[0]).bit_length() - 1
    return None


def _say(sock: socket.socket, word: object) -> None:
    sock.sendall(cast(bytes, msgpack.packb(word)))


if __name__ == "__main__":
    main()
