"""Native kernels as a processor chooses them that has fewer instruction sets than this one, or more than the suite allows."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kernels.cpu import attention, library
from kernels.cpu.library import Isa

_CHOICES = library.fastest_exact, library.fastest_of_bytes, library.fastest_of_bfloat16, attention.fastest
"""What is found out once for a process."""


@contextmanager
def up_to(isa: Isa) -> Iterator[None]:
    """Have models that are loaded meanwhile choose kernels up to `isa`. Skips the test where the processor has no such kernels,
    or none that it would choose."""
    if isa not in library.instruction_sets():
        pytest.skip(f"this processor has no {isa.name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_MAX_CPU_ISA", isa.name)
        _forget()
        try:
            if library.fastest_of_bfloat16() != isa:
                pytest.skip("this processor multiplies bfloat16 no quicker than float32")
            yield
        finally:
            patch.undo()
            _forget()


def _forget() -> None:
    for choice in _CHOICES:
        choice.cache_clear()
