"""What a forked process of the tests finds in its memory."""

import sys
from multiprocessing.connection import Connection

from tests.forked import FORKED, PRELOADED


def _tell(pipe: "Connection[list[str], None]") -> None:
    pipe.send(list(sys.modules))


def modules() -> set[str]:
    ours, theirs = FORKED.Pipe(duplex=False)
    process = FORKED.Process(target=_tell, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    found = set(ours.recv())
    process.join()
    return found


def test_a_forked_process_has_imported_the_code_already() -> None:
    assert set(PRELOADED) <= modules()


def test_it_may_still_choose_tritons_interpreter() -> None:
    assert "triton" not in modules()
