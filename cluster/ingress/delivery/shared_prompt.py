"""Several sequences that begin with one prompt: the first brings its KV to a decode instance, the others follow it there.

Invariant: at most one of them brings it at a time. A sequence that follows is an ordinary request: where the instance is full or
lost, it goes elsewhere like any other."""

import asyncio

from core.types import Request, Slo


class SharedPrompt:
    """Made by whoever generates the sequences, and given to `Frontend.generate` with each of them."""

    def __init__(self) -> None:
        self.home = ""
        """The decode instance that has the prompt's KV; empty: none is known."""
        self.sibling = ""
        """The key of the request that brought it there."""
        self.slo: Slo | None = None
        """The class by which that was served, as then are those that follow it."""
        self._bringing = asyncio.Lock()

    async def must_bring(self) -> bool:
        """Wait while another sequence brings the KV. True: the caller's sequence has to, and must call `arrived` or `give_up`."""
        await self._bringing.acquire()
        if self.home:
            self._bringing.release()
        return not self.home

    def arrived(self, home: str, sibling: Request) -> None:
        """The KV that `sibling` was to bring is at `home`."""
        self.home, self.sibling, self.slo = home, sibling.key, sibling.slo
        self._bringing.release()

    def give_up(self) -> None:
        """The sequence that was to bring it has ended or was lost: the next one does."""
        self._bringing.release()

    def lost(self, address: str) -> None:
        """What that instance had is gone."""
        if self.home == address:
            self.home = ""
