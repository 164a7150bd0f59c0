"""Which steps are to be captured as CUDA graphs: `engine.cuda_graphs`."""

from dataclasses import dataclass

from core.config.cluster_config import EngineConfig


@dataclass(frozen=True, slots=True)
class GraphSizes:
    sizes: tuple[int, ...] = ()
    """Numbers of tokens. None: nothing is captured."""
    max_seqs: int = 0
    """Sequences of a step at most."""
    are_named: bool = False
    """Whether the configuration names them: then nothing starts where they cannot be captured."""
    hand_over: bool = False
    """Whether transfers wait for the layers of most steps: then replays mark each as they write it."""

    @classmethod
    def of(cls, engine: EngineConfig, *, hand_over: bool = False) -> "GraphSizes":
        match engine.cuda_graphs:
            case "none":
                return cls()
            case "auto":
                most = max(engine.max_num_seqs, min(engine.max_batch_tokens, _MOST_TOKENS))
                return cls(auto_sizes(most), engine.max_num_seqs, hand_over=hand_over)
            case sizes:
                return cls(sizes, engine.max_num_seqs, are_named=True, hand_over=hand_over)


NO_GRAPHS = GraphSizes()
_MOST_TOKENS = 2048
"""An H100 computes so many for 5 ms with half a billion parameters, which takes Python 15 ms to launch."""


def auto_sizes(largest: int) -> tuple[int, ...]:
    """Return the numbers of tokens to capture up to `largest`. They pad steps by fewer than 8 rows, 16 from 64 on, 32 from 256
    on, 64 from 512 on, and 128 from 1,024 on."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16)]
    for start in (256, 512, 1024):
        sizes += range(start, 2 * start, start // 8)
    sizes += range(2048, largest + 1, 128)
    return (*(size for size in sizes if size < largest), largest)
