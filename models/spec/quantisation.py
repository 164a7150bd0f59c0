"""How a checkpoint's matrices are stored."""

from dataclasses import dataclass, replace
from typing import Literal

Number = Literal["float8", "int8", "float4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """How any matrix may be stored, though none has to be: a checkpoint's tensors say which are."""

    kind: Literal["scaled", "awq", "gptq", "packed", "gguf", "bitsandbytes", "hqq", "torchao"]
    """`scaled`: numbers times scales; `gguf`: each tensor of a GGUF file says it; `awq`, `gptq` and `packed` have `bits`, as
    AutoAWQ, GPTQ and compressed-tensors pack them; of the others each tensor's neighbours say it."""
    bits: Literal[4, 8] = 4
    """For all but `scaled`; at the most, where matrices differ."""
    bytes_each: float = 0.0
    """For `gguf`, the bytes that a CPU keeps of each number of the layers' matrices."""
    number: Number = "float8"
    """For `scaled`. `float4` is E2M1, two to a byte."""
    block: tuple[int, int] | None = None
    """For `scaled`, the rows and columns that share a scale. None means a scale for each row, or one for all."""
    group: int = 0
    """Inputs of a packed weight that share a scale; 0: all of them."""
    zero_offset: int = 0
    """The number to be added to the zero points that are stored."""
    rounds_activations: bool = False
    """For `scaled`, whether activations have as many bits as weights, in the same format, while they are multiplied."""
    others: tuple["Quantisation", ...] = ()
    """Further ways in which matrices of the same checkpoint are stored."""

    @property
    def ways(self) -> tuple["Quantisation", ...]:
        """Return all ways in which a matrix may be stored, each without the others."""
        return (replace(self, others=()), *self.others)
