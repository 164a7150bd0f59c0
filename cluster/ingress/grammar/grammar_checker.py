"""Refuses grammars that the ranks could not follow. Each new one is compiled once, in a process apart, within limits of size,
processor time and memory."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import cast
from weakref import finalize

import msgpack

from cluster.ingress.grammar.grammar_process import MORE_BYTES, PROCESSOR_S
from core.errors import Overloaded, ReplicaLost, RequestError
from core.parent_death import child_environment

MAX_GRAMMAR_BYTES = 128 << 10
_LARGE_BYTES = 16 << 10
"""Larger ones have a process of their own, of less priority, so that no other grammar waits for them."""
_MAX_REMEMBERED = 1024
_MAX_WAITING = 32
_PATIENCE_S = 60.0
"""How long a request waits, and a process has for one grammar and its start. Only a stalled machine needs as long."""
_ROOT = Path(__file__).parents[3]
_TOO_WIDE = re.compile(r"row has (\d+) items; max is (\d+)")
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS}
_TOO_SLOW = f"the grammar is too costly: it takes more than {PROCESSOR_S} s of a processor to compile"
_TOO_LARGE = f"the grammar nests too deeply, or needs more than {MORE_BYTES >> 20} MiB of memory to compile"


class GrammarChecker:
    """One ingress' checks. Starts its processes when they are first needed; they end with it."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """`folder` is the checkpoint's, with its tokenizer.json; `vocab_size` is the width of the logits."""
        arguments = str(folder), str(vocab_size)
        self._processes = {False: _Process(*arguments, "0"), True: _Process(*arguments, "10")}
        self._complaints: OrderedDict[bytes, str] = OrderedDict()
        self._asked: dict[bytes, asyncio.Future[str]] = {}

    async def check(self, grammar: str, field: str) -> None:
        """Raise RequestError for a grammar that the ranks could not follow, Overloaded or ReplicaLost where it is not known."""
        encoded = grammar.encode()
        if len(encoded) > MAX_GRAMMAR_BYTES:
            raise RequestError(
                f"{field}: the grammar has {len(encoded)} bytes, and {MAX_GRAMMAR_BYTES} are the limit",
                field=field,
            )
        digest = sha256(encoded).digest()
        if (complaint := self._complaints.get(digest)) is None:
            complaint = await self._answer(digest, grammar, is_large=len(encoded) > _LARGE_BYTES)
        if complaint:
            raise RequestError(f"{field}: {_in_words(complaint)}", field=field)

    async def _answer(self, digest: bytes, grammar: str, *, is_large: bool) -> str:
        asked = self._asked.get(digest)
        if asked is None:
            if len(self._asked) >= _MAX_WAITING:
                raise Overloaded(f"{_MAX_WAITING} new grammars wait to be compiled", PROCESSOR_S)
            asked = asyncio.wrap_future(self._processes[is_large].submit(grammar))
            self._asked[digest] = asked
            asked.add_done_callback(partial(self._answered, digest))
        try:
            async with asyncio.timeout(_PATIENCE_S):
                return await asyncio.shield(
                    asked
                )  # others may wait for the same, also when this client has left
        except TimeoutError:
            raise ReplicaLost(f"the grammar was not compiled within {_PATIENCE_S:.0f} s") from None

    def _answered(self, digest: bytes, asked: "asyncio.Future[str]") -> None:
        del self._asked[digest]
        if not asked.cancelled() and asked.exception() is None:
            self._complaints[digest] = asked.result()
            if len(self._complaints) > _MAX_REMEMBERED:
                self._complaints.popitem(last=False)


def _in_words(complaint: str) -> str:
    """Say of llguidance's limit on alternatives what the client can change. It counts several for one of the client's."""
    found = _TOO_WIDE.search(complaint)
    if found is None:
        return complaint
    return (
        f"the grammar is too wide: {found[1]} ways to go on at one place, and {found[2]} are the limit. A schema has about four "
        "for each property that may be absent: require some, or nest them in objects; a grammar, one for each alternative of a "
        "rule: make them one terminal"
    )


class _Process:
    """A `grammar_process`, and the next one where it has died. It is asked one grammar at a time, on a thread."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        # The kernel ends a process with the thread that started it. This one lives as long as the object.
        self._thread = ThreadPoolExecutor(1, "grammar-check")
        self._child: _Child | None = None

    def submit(self, grammar: str) -> "Future[str]":
        """Return what is wrong with the grammar. The future raises ReplicaLost where no process can say."""
        return self._thread.submit(self._complaint, grammar)

    def _complaint(self, grammar: str) -> str:
        ended = "none could be started"
        for _ in range(2):  # what ended the first one may have been meant for another
            try:
                answer = self._asked(grammar)
            except TimeoutError:
                self._child = None
                raise ReplicaLost(f"the grammar was not compiled within {_PATIENCE_S:.0f} s") from None
            except OSError as error:
                self._child, ended = None, str(error)
                continue
            if isinstance(answer, str):
                return answer
            if answer == signal.SIGPROF:
                return _TOO_SLOW
            if answer in _CRASHES:
                return _TOO_LARGE
            ended = f"killed by {signal.Signals(answer).name}"
        raise ReplicaLost(f"the process that compiles grammars has died twice ({ended}); try again")

    def _asked(self, grammar: str) -> str | int:
        if self._child is None:
            self._child = _Child(self._arguments)
        return self._child.ask(grammar)


class _Child:
    def __init__(self, arguments: tuple[str, ...]) -> None:
        self._sock, theirs = socket.socketpair()
        self._sock.settimeout(_PATIENCE_S)
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with theirs:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "cluster.ingress.grammar.grammar_process",
                    str(theirs.fileno()),
                    *arguments,
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=child_environment({"PYTHONPATH": os.pathsep.join(paths)}),
            )
        finalize(self, _end, process, self._sock)
        self._answers = msgpack.Unpacker()
        self._number = 0

    def ask(self, grammar: str) -> str | int:
        """Return the complaint, or the signal that has ended the process. Raises OSError where it has closed its connection,
        TimeoutError where it does not answer."""
        self._number += 1
        self._sock.sendall(cast(bytes, msgpack.packb([self._number, grammar])))
        while data := self._sock.recv(1 << 16):
            self._answers.feed(data)
            for answer in self._answers:
                if isinstance(answer, int):
                    return answer
                number, complaint = answer
                if number == self._number:  # not of a grammar that was given up when its process had died
                    return complaint
        raise ConnectionResetError("it has closed its connection")


def _end(process: "subprocess.Popen[bytes]", sock: socket.socket) -> None:
    sock.close()
    process.kill()
    process.wait()
