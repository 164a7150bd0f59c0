"""Where a request goes: the seam, and the first policy behind it. Pure."""

from collections.abc import Sequence
from typing import Protocol

from cluster.fleet import Instance
from cluster.scoring import Choice, local_s, prefill_s, pressure_s, rate, transfer_s, uncached
from core.kv import num_blocks_for
from core.messages import Place

_EXPECTED_OUTPUT_TOKENS = 256
"""KV growth that is reserved for an answer of unknown length."""


class PlacementPolicy(Protocol):
    def choose(self, place: Place, fleet: Sequence[Instance], hits: dict[str, int]) -> Choice | None:
        """A placement that fits now, or None: wait. `hits` are leading cached blocks by instance address."""
        ...

    def choose_prefill(self, num_tokens: int, fleet: Sequence[Instance], lost: str) -> Instance | None: ...


class CostPolicy:
    """The cheapest placement by `cluster.scoring`, among those with room. Ties go to the lower address."""

    def __init__(self, local_threshold_tokens: int) -> None:
        self._local_threshold_tokens = local_threshold_tokens

    def choose(self, place: Place, fleet: Sequence[Instance], hits: dict[str, int]) -> Choice | None:
        alive = [i for i in fleet if i.address not in place.exclude] or list(fleet)
        decodes = [(i, self._blocks(place, i, hits)) for i in alive if i.info.decodes]
        fitting = [
            (i, blocks)
            for i, blocks in decodes
            if i.free_blocks >= blocks and i.num_seqs < i.info.max_num_seqs
        ]
        prefills = [i for i in alive if i.info.prefills]
        if not any(i.info.decodes for i in alive) or not fitting:
            return None
        local = min((self._local(place, i, blocks, hits) for i, blocks in fitting), key=_by_cost)
        if not prefills or local.uncached_tokens <= self._local_threshold_tokens:
            return local
        roomy = [i for i in prefills if i.has_prompt_room(rate(i))]
        if not roomy:
            return None
        remote = self._remote(place, roomy, fitting, hits)
        return min((remote, local), key=_by_cost)

    def choose_prefill(self, num_tokens: int, fleet: Sequence[Instance], lost: str) -> Instance | None:
        """For a reservation whose prefill instance was lost."""
        others = [i for i in fleet if i.info.prefills and i.address != lost]
        return min(others, key=lambda i: (i.queued_tokens / rate(i), i.address), default=None)

    def _remote(
        self,
        place: Place,
        prefills: list[Instance],
        decodes: list[tuple[Instance, int]],
        hits: dict[str, int],
    ) -> Choice:
        prefill = min(prefills, key=lambda i: (prefill_s(place, i, hits), i.address))
        compute_s = prefill_s(place, prefill, hits)
        tokens = uncached(place, prefill, hits)
        choices = (
            Choice(
                decode,
                prefill,
                compute_s + transfer_s(place, prefill, decode, hits) + pressure_s(decode),
                blocks,
                tokens,
            )
            for decode, blocks in decodes
        )
        return min(choices, key=_by_cost)

    def _local(self, place: Place, decode: Instance, blocks: int, hits: dict[str, int]) -> Choice:
        return Choice(decode, None, local_s(place, decode, hits), blocks, uncached(place, decode, hits))

    def _blocks(self, place: Place, decode: Instance, hits: dict[str, int]) -> int:
        """For the prompt and the growth that is to be expected, as far as the instance could ever hold it."""
        length = place.num_tokens + min(place.max_new_tokens, _EXPECTED_OUTPUT_TOKENS)
        cached = hits.get(decode.address, 0)
        blocks = decode.blocks_needed(length, place.block_hashes, cached)
        return min(
            blocks, max(decode.info.num_blocks, num_blocks_for(place.num_tokens, decode.info.block_size))
        )


def _by_cost(choice: Choice) -> tuple[float, str]:
    return choice.cost_s, choice.decode.address
