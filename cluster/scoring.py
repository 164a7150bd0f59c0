"""What a placement costs, in seconds. Pure.

First token, disaggregated:  prefill queue + uncached tokens / prefill rate + KV over the link + decode pressure
First token, local:          decode queue + uncached tokens / decode rate x (1 + harm to those that run there) + decode pressure

The harm term: while an instance computes a prompt, each sequence that runs there, or that will come meanwhile (one is
counted for those), waits part of that time for its next token; HARM_PER_SEQUENCE is that part. Pressure prefers instances
whose steps are short and whose KV cache has room."""

from dataclasses import dataclass

from cluster.fleet import DEFAULT_TOKENS_PER_S, Instance
from core.messages import Place

HARM_PER_SEQUENCE = 0.25
FULL_CACHE_S = 0.1
"""How many seconds a full KV cache is worth avoiding."""
SAME_HOST_TOKEN_S = 1e-6
OTHER_HOST_TOKEN_S = 6e-6
"""Link time of one token's KV: 320 KB (Llama-3-70B) at 50 GB/s."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A placement that can be made now. `prefill` is None for local execution."""

    decode: Instance
    prefill: Instance | None
    cost_s: float
    decode_blocks: int
    """Blocks that it takes of the decode instance."""
    uncached_tokens: int
    """Prompt tokens that whoever computes the prompt must compute."""


def rate(instance: Instance) -> float:
    return instance.measured_tokens_per_s or DEFAULT_TOKENS_PER_S


def uncached(place: Place, instance: Instance, hits: dict[str, int]) -> int:
    """Tokens to compute there; the last one always, since its logits are needed."""
    return max(1, place.num_tokens - hits.get(instance.address, 0) * instance.info.block_size)


def pressure_s(instance: Instance) -> float:
    busy = instance.num_seqs / instance.info.max_num_seqs
    full = 1.0 - instance.free_blocks / instance.info.num_blocks
    return instance.step_s * busy + FULL_CACHE_S * full * full


def prefill_s(place: Place, instance: Instance, hits: dict[str, int]) -> float:
    return (instance.queued_tokens + uncached(place, instance, hits)) / rate(instance) + instance.step_s


def transfer_s(place: Place, prefill: Instance, decode: Instance, hits: dict[str, int]) -> float:
    same_host = prefill.info.host == decode.info.host
    return uncached(place, decode, hits) * (SAME_HOST_TOKEN_S if same_host else OTHER_HOST_TOKEN_S)


def local_s(place: Place, instance: Instance, hits: dict[str, int]) -> float:
    compute_s = uncached(place, instance, hits) / rate(instance)
    queue_s = instance.queued_tokens / rate(instance)
    return (
        queue_s
        + compute_s * (1 + HARM_PER_SEQUENCE * (1 + instance.num_seqs))
        + instance.step_s
        + pressure_s(instance)
    )
