"""Which sequences get an instance's slots, where more of them are here than it runs at once."""

from collections.abc import Iterable

from core.ports import ServedSequence


def has_slot(seq: ServedSequence, num_placed: int, num_slots: int) -> bool:
    """Return whether a waiting sequence may begin. Sequences that were computed elsewhere may fill more than all slots. Preempted
    ones do not wait until these have left."""
    return num_placed < num_slots or (seq.num_output > 0 and num_placed > num_slots)


def decode_slots(
    num_slots: int, num_decoding: int, begun: Iterable[ServedSequence], waiting: Iterable[ServedSequence]
) -> int:
    """Return how many sequences a step decodes.

    Sequences whose prompts were computed elsewhere may wait for a slot here. While more of them come, prompts that have been
    `begun` and preempted sequences among those `waiting` would never get one. So a slot is left for these."""
    if num_decoding <= num_slots:
        return num_slots
    is_passed = any(True for _ in begun) or any(seq.num_output for seq in waiting)
    return max(1, num_slots - is_passed)
