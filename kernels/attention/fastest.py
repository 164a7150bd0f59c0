"""Which of several implementations is the fastest, from interleaved timings of a noisy machine."""

from collections.abc import Mapping, Sequence
from statistics import median

MIN_GAIN = 0.03
"""The gain below which a difference of medians may be noise, so that another run would choose otherwise."""


def fastest(timings_s: Mapping[str, Sequence[float]], current: str) -> str:
    """Return the name with the least median, the first among equals. `current` is kept unless that is MIN_GAIN faster. It may
    have no timings, and is then not kept."""
    medians_s = {name: median(times) for name, times in timings_s.items()}
    best = min(medians_s, key=medians_s.__getitem__)
    if current not in medians_s or medians_s[best] <= (1 - MIN_GAIN) * medians_s[current]:
        return best
    return current
