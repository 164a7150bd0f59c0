"""`python -I -S guard_process.py PARENT BEAT_S NUM_BEATS`: kills its parent once that has written nothing for so many beats.

Beats are counted, not seconds: if all processes stand still, the parent gets its full time again. A parent that somebody has
stopped is left alone, since it may be told to go on. It imports little, since it is started with each instance."""

import os
import select
import signal
import sys


def main() -> None:
    parent, beat_s, num_beats = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    num_silent = 0
    while True:
        ready, _, _ = select.select([0], [], [], beat_s)
        if os.getppid() != parent or (ready and not os.read(0, 4096)):
            return  # it has ended, or needs no guard any more
        num_silent = 0 if ready or _is_stopped(parent) else num_silent + 1
        if num_silent >= num_beats:
            stood_s = num_beats * beat_s
            sys.stderr.write(
                f"process {parent} is killed: its event loop has stood still for {stood_s:g} s\n"
            )
            os.kill(parent, signal.SIGKILL)
            return


def _is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b") ")[2][:1] in (b"T", b"t")


if __name__ == "__main__":
    main()
