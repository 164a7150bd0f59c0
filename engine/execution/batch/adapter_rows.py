"""Which rows of a step have an adapter: what a batch says to the layers that add its products."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from engine.execution.batch.step_memory import Pack, Placed
from kernels.ops import Rows


class AdapterRows:
    """The rows of each adapter, packed on the host. Call `rows` when the pack is sent."""

    def __init__(self, adapters: Sequence[str], lens: Sequence[int], pack: Pack) -> None:
        """`adapters[i]`, perhaps empty, is that of the sequence whose rows are the next `lens[i]`."""
        spans: dict[str, list[slice]] = {}
        for adapter, count, end in zip(adapters, lens, accumulate(lens), strict=True):
            if adapter:
                spans.setdefault(adapter, []).append(slice(end - count, end))
        self._placed: dict[str, slice | Placed] = {name: _placed(own, pack) for name, own in spans.items()}

    def rows(self) -> Mapping[str, Rows]:
        return {name: at if isinstance(at, slice) else at() for name, at in self._placed.items()}


NO_ADAPTERS = AdapterRows((), (), Pack())


def _placed(spans: Sequence[slice], pack: Pack) -> slice | Placed:
    """Return one run of neighbours as it is, and put other rows' numbers into the pack."""
    start, stop = spans[0].start, spans[-1].stop
    if sum(span.stop - span.start for span in spans) == stop - start:
        return slice(start, stop)
    return pack.add(np.concatenate([np.arange(span.start, span.stop) for span in spans]))
