"""Both tiers behind one interface. Blocks are saved as their KV is completed, and loaded into fresh blocks when a prompt needs
them.

Saving copies a block out before anything can overwrite it. One thread reads and writes the disk. Another one fills device blocks,
so that a request whose blocks were in host memory does not wait for the disk."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from core.reports import TierCounts
from engine.tiers.block_pieces import BlockPieces
from engine.tiers.disk_tier import DiskTier
from engine.tiers.host_tier import HostTier
from engine.tiers.reads_first import ReadsFirst

_MAX_UNWRITTEN_BYTES = 1 << 30
"""So much may be on its way to the disk. Further blocks are not saved there. A recurrent state is hundreds of blocks at once."""


class TierStore:
    """The store of all ranks of an instance together. `pieces` are what they hold of each block."""

    def __init__(self, pieces: BlockPieces, host: HostTier, disk: DiskTier | None, root: bytes) -> None:
        """`root` is the fingerprint that digests begin with."""
        self._pieces, self._host, self._disk, self.root = pieces, host, disk, root
        self._unwritten: dict[bytes, bytes] = {}
        self._thread = ReadsFirst("kv-tiers")
        self._filler = ThreadPoolExecutor(1, "kv-fill")
        self.on_saved: Callable[[bytes, bytes], None] | None = None
        """Called with each saved block's digest and content."""
        self.on_gone: Callable[[bytes], None] = lambda _: None
        """Called with each block that no tier has any more, on the thread that has given it up. It may have come back since."""
        if disk is not None:
            disk.on_gone = self._left
        self._saved = self._host_hits = self._disk_hits = self._missed = 0

    @property
    def counts(self) -> TierCounts:
        return TierCounts(self._saved, self._host_hits, self._disk_hits, self._missed)

    @property
    def host(self) -> HostTier:
        """The blocks in host memory, which outlive this store where somebody keeps them."""
        return self._host

    @property
    def num_host_blocks(self) -> int:
        """The number of blocks that host memory has room for."""
        return self._host.num_blocks

    def __contains__(self, digest: bytes) -> bool:
        on_disk = self._disk is not None and digest in self._disk
        return digest in self._host or digest in self._unwritten or on_disk

    def save(self, digest: bytes, block: int, before: bytes) -> None:
        """Copy out a block whose KV is complete, and which follows the block `before` (as in `HostTier.put`). On return it
        may be overwritten."""
        if digest in self._host:
            self._host.learn(digest, before)
        else:
            self._pieces.save(block, lambda content: self._save(digest, content, before))

    def keep(self, digest: bytes, block: int, before: bytes) -> None:
        """Save a block, or give it up last if host memory has it. It will be wanted soon."""
        if self._host.get(digest) is None:
            self.save(digest, block, before)

    def learn(self, digest: bytes, before: bytes) -> None:
        """Learn which block one follows that has come from a buddy or from the disk, if host memory has it."""
        self._host.learn(digest, before)

    def _save(self, digest: bytes, content: bytes, before: bytes = b"") -> None:
        self._saved += 1
        self._keep(digest, content, before)
        if self.on_saved is not None:
            self.on_saved(digest, content)

    def accept(self, digest: bytes, content: bytes) -> None:
        """Keep a block that another instance has computed. A block of another size does not have this layout and is refused."""
        if len(content) == self._pieces.num_bytes and digest not in self._host:
            self._keep(digest, content)

    def _keep(self, digest: bytes, content: bytes, before: bytes = b"") -> None:
        for gone, old, its_before in self._host.put(digest, content, before):
            is_full = len(self._unwritten) * len(old) >= _MAX_UNWRITTEN_BYTES
            if self._disk is not None and gone not in self._disk and not is_full:
                self._unwritten[gone] = old
                self._thread.write(partial(self._write, self._disk, gone, its_before))
            self._left(gone)

    def _left(self, digest: bytes) -> None:
        """A tier has given up a block."""
        if digest not in self:
            self.on_gone(digest)

    def drop(self) -> tuple[int, int]:
        """Give up all blocks. Returns how many there were, in host memory and on disk. What is fetched later is not found."""
        gone = self._host.drop()
        num_host, num_disk = len(gone), 0
        if self._disk is not None:
            num_disk = len(self._disk) + len(self._unwritten)
            gone += self._unwritten
            self._unwritten.clear()
            self._thread.before_reads(self._disk.drop)
        for digest in gone:
            self._left(digest)
        return num_host, num_disk

    async def fetch(self, digests: Sequence[bytes]) -> list[bytes]:
        """Return the blocks' contents, in order, up to the first that cannot be had. What was on disk only is saved again above
        it."""
        contents = await self._thread.read(partial(self._fetch, digests))
        for digest, content in zip(digests, contents, strict=False):
            if digest not in self._host:
                self._save(digest, content)
        return contents

    async def fill(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        """Put contents into device blocks, on a thread."""
        await asyncio.get_running_loop().run_in_executor(self._filler, self._fill, blocks, contents)

    async def close(self) -> None:
        """Close, after what is on its way to the disk."""
        await asyncio.to_thread(self._pieces.close)
        await asyncio.to_thread(self._thread.close)
        self._filler.shutdown()
        if self._disk is not None:
            self._disk.close()

    def _fetch(self, digests: Sequence[bytes]) -> list[bytes]:
        contents: list[bytes] = []
        for digest in digests:
            content = self._find(digest)
            if content is None:
                self._missed += len(digests) - len(contents)
                break
            contents.append(content)
        return contents

    def _fill(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        for block, content in zip(blocks, contents, strict=True):
            self._pieces.scatter(block, memoryview(content))

    def _find(self, digest: bytes) -> bytes | None:
        if (content := self._host.get(digest) or self._unwritten.get(digest)) is not None:
            self._host_hits += 1
            return content
        if self._disk is not None and (content := self._disk.get(digest)) is not None:
            self._disk_hits += 1
            return content
        return None

    def _write(self, disk: DiskTier, digest: bytes, before: bytes) -> None:
        if (content := self._unwritten.get(digest)) is not None:  # else all was dropped
            disk.put(digest, content, before)
            self._unwritten.pop(digest, None)
            self._left(digest)
