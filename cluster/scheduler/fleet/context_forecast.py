"""How many tokens sequences will hold some steps from now if no other joins them: each grows by one with every step, until its
output ends."""

from typing import Final

from cluster.scheduler.fleet.length_curve import LengthCurve

HORIZONS: Final = (0, 64, 128, 256, 512, 1024)
"""Steps from now. What sequences hold together is most at one of them, but for a few in a hundred."""
Contexts = tuple[float, float, float, float, float, float, float]
"""The tokens that are expected at each of the `HORIZONS`, and how many more of output a lone sequence would be given room for."""
NO_CONTEXTS: Contexts = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def forecast(
    curve: LengthCurve, num_prompt: int, num_output: int, most_output: int, chance: float
) -> Contexts:
    """Return the expected tokens of a sequence whose output has come to `num_output` tokens and ends at `most_output` at the
    latest. Once it has ended it has none. Alone it gets room
    for so much by `chance` (`SchedulerTuning.chance`), but never for more than `most_output`."""
    now, room, longer = (
        float(num_prompt + num_output),
        most_output - num_output,
        curve.longer_than(num_output),
    )
    found, still, rest = [now], 1.0, 0.0
    for index in range(1, len(HORIZONS)):
        steps, before = HORIZONS[index], HORIZONS[index - 1]
        later = curve.longer_than(num_output + min(steps, max(0, room))) / longer
        rest += (still + later) / 2 * max(0, min(steps, room) - before)
        still = later if steps < room else 0.0
        found.append((now + steps) * still)
    more = min(chance * rest, room - (max(found) - now))
    return found[0], found[1], found[2], found[3], found[4], found[5], max(0.0, more)


def added(a: Contexts, b: Contexts, sign: float = 1.0) -> Contexts:
    return (
        a[0] + sign * b[0],
        a[1] + sign * b[1],
        a[2] + sign * b[2],
        a[3] + sign * b[3],
        a[4] + sign * b[4],
        a[5] + sign * b[5],
        a[6] + sign * b[6],
    )


def without(a: Contexts, b: Contexts) -> Contexts:
    """Return what is left of `a`, of which `b` was a part, apart from rounding."""
    left = added(a, b, -1.0)
    return (
        max(0.0, left[0]),
        max(0.0, left[1]),
        max(0.0, left[2]),
        max(0.0, left[3]),
        max(0.0, left[4]),
        max(0.0, left[5]),
        max(0.0, left[6]),
    )


def scaled(a: Contexts, factor: float) -> Contexts:
    return (
        a[0] * factor,
        a[1] * factor,
        a[2] * factor,
        a[3] * factor,
        a[4] * factor,
        a[5] * factor,
        a[6] * factor,
    )


def even(tokens: float) -> Contexts:
    """Return what sequences hold of which nothing is known but what they hold now."""
    return (tokens, tokens, tokens, tokens, tokens, tokens, 0.0)


def growth(a: Contexts) -> float:
    """Return by how many tokens they will be more, at any of the horizons."""
    return max(a[0], a[1], a[2], a[3], a[4], a[5]) - a[0]
