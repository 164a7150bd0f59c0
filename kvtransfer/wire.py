"""What the two sides of a hand-over must agree on before a byte is written. Pure.

Block sizes, layers and heads of a rank may differ: `kvtransfer/copies.py` maps them. The rest is refused, naming both sides."""

from core.errors import TransferError
from core.kv import KVShard
from core.messages import Grant, RegionKey

POOL_FORMAT = "baton-kv-1"
"""How a pool's bytes are laid out (`core/kv.py`); another layout gets another name. Travels as `RegionKey.name`."""


def check_compatible(source: KVShard, region: RegionKey) -> None:
    """Raises TransferError when no copy from `source` into `region` could be right."""
    ours, theirs = source.layout, region.shard.layout
    for what, mine, its in (
        ("the pool's format", POOL_FORMAT, region.name),
        ("the number of layers", ours.num_layers, theirs.num_layers),
        ("the number of KV heads", ours.num_kv_heads, theirs.num_kv_heads),
        ("the head's dimension", ours.head_dim, theirs.head_dim),
        ("the KV dtype", ours.dtype, theirs.dtype),
    ):
        if mine != its:
            raise TransferError(
                f"KV cannot be handed over: {what} is {mine} on the prefill side and {its} on the decode side. "
                "Serve the same model with the same dtype in both pools."
            )


def check_grant(source: KVShard, grant: Grant) -> None:
    """Raises TransferError for a grant that `source` cannot fill, or whose blocks do not hold its tokens."""
    if grant.num_tokens <= 0 or grant.first_token < 0 or not grant.regions:
        raise TransferError(
            f"grant {grant.id} is empty: {grant.num_tokens} tokens, {len(grant.regions)} regions"
        )
    for region in grant.regions:
        check_compatible(source, region)
        size = region.shard.layout.block_size
        if grant.first_token % size or len(grant.block_ids) * size < grant.num_tokens:
            raise TransferError(
                f"grant {grant.id} covers tokens {grant.first_token} to {grant.first_token + grant.num_tokens}, "
                f"which its {len(grant.block_ids)} blocks of {size} do not hold"
            )
        if not all(0 <= block < region.num_blocks for block in grant.block_ids):
            raise TransferError(f"grant {grant.id} names blocks outside a pool of {region.num_blocks}")
