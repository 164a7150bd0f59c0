"""Names of KV blocks outside the device: 128-bit digests of everything that their content depends on."""

import hashlib
import struct
from collections.abc import Iterator, Sequence

DIGEST_BYTES = 16


def root_digest(fingerprint: bytes, salt: str) -> bytes:
    """Return the digest that all chains begin with. `fingerprint` is of the model, its weights and the pool's layout."""
    return hashlib.blake2b(fingerprint + b"\0" + salt.encode(), digest_size=DIGEST_BYTES).digest()


def child_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    return hashlib.blake2b(parent + packed, digest_size=DIGEST_BYTES).digest()


def state_digests(prefix: bytes, num_blocks: int) -> Iterator[bytes]:
    """Yield the names of the blocks of the recurrent state behind a prefix with this digest, made as they are asked for."""
    for index in range(num_blocks):
        yield hashlib.blake2b(prefix + b"state" + struct.pack("<I", index), digest_size=DIGEST_BYTES).digest()


def prefix_digests(root: bytes, tokens: Sequence[int], block_size: int) -> Iterator[bytes]:
    """Yield one digest for each full block of `tokens`, made as it is asked for."""
    digest = root
    for start in range(0, len(tokens) - block_size + 1, block_size):
        digest = child_digest(digest, tokens[start : start + block_size])
        yield digest
