"""Where a model may be cut into stages of a pipeline, whose layers share layers of the KV pool."""

from collections.abc import Sequence


def stage_starts(written: Sequence[int]) -> tuple[int, ...]:
    """Return the layers that a stage may begin with: those before them use other layers of the pool than all from them on.
    `written` says of each layer which of the pool's it writes, or reads where it has no keys and values of its own."""
    later = (layer for layer in range(1, len(written)) if max(written[:layer]) < min(written[layer:]))
    return 0, *later
