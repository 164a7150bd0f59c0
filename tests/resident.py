"""What this process has of a file in its memory, as the system counts it."""

from pathlib import Path

SMAPS = Path("/proc/self/smaps")


def resident_bytes(file: Path) -> int:
    found, is_files = 0, False
    for line in SMAPS.read_text().splitlines():
        key, *rest = line.split()
        if not key.endswith(":"):  # the first line of a mapping
            is_files = rest[-1] == str(file)
        elif key == "Rss:" and is_files:
            found += 1024 * int(rest[0])
    return found
