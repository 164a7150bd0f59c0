"""Which steps are to be captured as CUDA graphs: `engine.cuda_graphs`."""

from dataclasses import dataclass

from core.config import EngineConfig


@dataclass(frozen=True, slots=True)
class GraphSizes:
    sizes: tuple[int, ...] = ()
    """Numbers of tokens. None: nothing is captured."""
    are_named: bool = False
    """Whether the configuration names them: then nothing starts where they cannot be captured."""

    @classmethod
    def of(cls, engine: EngineConfig) -> "GraphSizes":
        match engine.cuda_graphs:
            case "off":
                return cls()
            case "auto":
                return cls(auto_sizes(max(engine.max_num_seqs, min(engine.max_batch_tokens, _MOST_TOKENS))))
            case sizes:
                return cls(sizes, True)


NO_GRAPHS = GraphSizes()
_MOST_TOKENS = 512
"""Steps of more tokens are computed for longer than Python takes to launch them."""


def auto_sizes(largest: int) -> tuple[int, ...]:
    """Return the numbers of tokens to capture up to `largest`. They pad steps by fewer than 8 rows, 16 from 64 on and 32 from 256
    on."""
    sizes = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, largest + 1, 32))
    return (*(size for size in sizes if size < largest), largest)
