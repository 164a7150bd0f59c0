"""Images of a prompt: what the client sent, and which of the prompt's tokens stand for them.

Invariant: wherever sequences are compared (prefix caches, tiers, routing), an image's tokens are named by what it shows. In the
vocabulary they are all the same token."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from struct import unpack

FIRST_ROW = 1 << 31
"""Names of an image's tokens are at least this, and fit into 32 bits. No vocabulary is so large."""
_NAME_BYTES = 4


@dataclass(frozen=True)
class PromptImage:
    """What is made of the content is made once in a process, and kept beside it."""

    data: bytes
    """The encoded image (PNG, JPEG, WebP or GIF), as the client sent it."""
    spans: tuple[tuple[int, int], ...]
    """(first token, number of tokens) of each run of the prompt's tokens that stand for it, in order. The model gives it as many
    rows, one for each of these tokens."""
    columns: int = 0
    """Where a model gives its tokens positions in a plane (M-RoPE, arXiv:2409.12191), how many of them are in each row of it.
    They are one run then. 0: their positions are those of text."""
    both_ways: bool = False
    """Whether the tokens of each run attend to each other in both directions, so that one step must compute all of it. Else a
    token attends to those before it alone, as text does."""

    @property
    def end(self) -> int:
        """The number of the prompt's tokens up to the image's last one."""
        start, count = self.spans[-1]
        return start + count

    @property
    def num_rows(self) -> int:
        return sum(count for _, count in self.spans)

    @property
    def position_shift(self) -> int:
        """What is added to the number of a token behind it for that token's position: in a plane the next text begins behind the
        longer side."""
        if not self.columns:
            return 0
        return max(self.num_rows // self.columns, self.columns) - self.num_rows

    @cached_property
    def digest(self) -> bytes:
        """Tells its content from all others'."""
        return hashlib.blake2b(self.data).digest()

    @cached_property
    def names(self) -> tuple[int, ...]:
        """The names of its tokens. Each has 31 bits of SHAKE-256, so that a block of 16 tokens tells images apart by 496
        bits."""
        stream = hashlib.shake_256(self.data).digest(_NAME_BYTES * self.num_rows)
        return tuple(name | FIRST_ROW for name in unpack(f"<{self.num_rows}I", stream))


def with_names(prompt: tuple[int, ...], images: Sequence[PromptImage]) -> tuple[int, ...]:
    """Return the prompt with each token of an image named by the image's content and by which of its tokens it is."""
    named = list(prompt)
    for image in images:
        names, at = image.names, 0
        for start, count in image.spans:
            named[start : start + count] = names[at : at + count]
            at += count
    return tuple(named)
