"""What the two sides of a hand-over must agree on before a byte is written.

A `KVContent` describes KV state as the model means it: which model, which layers and heads, what kind of state, in what dtype and
with what scales. It says nothing of a cache's blocks, so pools of any layout can be compared by it. It travels in each RegionKey
as a msgpack map with names, so that releases may add to it. A reader skips names that it does not know, unless the writer lists
them in `requires`. Both sides say which versions of the rules they speak and use the highest that both do."""

import importlib.metadata
from dataclasses import asdict, dataclass, replace

import msgpack

from core.errors import TransferError
from core.kv import DTYPE_BYTES, KVShard
from core.messages import Grant, RegionKey
from net.codec import read_fields

POOL_FORMAT = "baton-kv-1"
"""How a pool's bytes are laid out (`core/kv.py`); another layout gets another name. Travels as `RegionKey.name`."""
SPEAKS = (1, 1)
"""The lowest and the highest version of the rules in this file that this release can follow."""
KNOWN_REQUIREMENTS = frozenset({"base", "groups", "states"})
"""What a peer may demand that this release understands. `base`: the pool does not begin where its memory does. `groups`: a
vector has several scales, and some of its numbers have none. `states`: a sequence's first blocks have its recurrent state, each
head of the pool its part (`kernels/states.py`). Peers that say `recurrent` lay a state out in one piece."""
_FLOATS = frozenset({"float32", "bfloat16", "float16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class KVContent:
    model: str
    """The revision of the weights. An empty one is unknown, and taken to fit."""
    state: str
    """`kv`: keys and values of each head; `mla`: one latent vector for all."""
    num_layers: int
    num_heads: int
    head_dim: int
    layers: tuple[int, int]
    heads: tuple[int, int]
    """The ranges of the model's layers and heads that are here."""
    dtype: str
    scales: str
    packing: str = POOL_FORMAT
    speaks: tuple[int, int] = SPEAKS
    software: str = ""
    requires: tuple[str, ...] = ()
    state_tokens: int = 0
    """The number of tokens whose place a sequence's recurrent state takes, before the others."""


def software() -> str:
    try:
        return f"baton {importlib.metadata.version('baton-serve')}"
    except importlib.metadata.PackageNotFoundError:
        return "baton (not installed)"


_SOFTWARE = software()


def content_of(shard: KVShard, model: str = "", base_bytes: int = 0) -> KVContent:
    """Return what a rank's pool holds, in this release's words."""
    layout = shard.layout
    return KVContent(
        model=model,
        state=layout.state,
        num_layers=layout.num_layers,
        num_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        layers=shard.layers,
        heads=shard.heads,
        dtype=layout.dtype,
        scales=layout.scales,
        software=_SOFTWARE,
        requires=("base",) * bool(base_bytes)
        + ("groups",) * (layout.num_scales > 1 or layout.num_kept > 0)
        + ("states",) * bool(layout.state_blocks),
        state_tokens=layout.state_tokens,
    )


def pack(content: KVContent) -> bytes:
    return msgpack.packb(asdict(content))  # type: ignore[return-value]


def unpack(data: bytes) -> KVContent:
    """Read a description. Raises TransferError for what no release can have written."""
    try:
        return read_fields(KVContent, msgpack.unpackb(data))
    except (ValueError, TypeError, IndexError, KeyError, msgpack.UnpackException) as error:
        raise TransferError(f"unreadable description of a KV pool: {error}") from error


def agree(ours: KVContent, theirs: KVContent, us: str = "prefill", them: str = "decode") -> int:
    """Return the version of the rules that both follow. Raises TransferError, naming both sides, when no write could be right."""
    version = min(ours.speaks[1], theirs.speaks[1])
    lowest = max(ours.speaks[0], theirs.speaks[0])
    mine, its = (
        f"{us} ({ours.software or 'unknown release'})",
        f"{them} ({theirs.software or 'unknown release'})",
    )
    if version < lowest:
        raise TransferError(
            f"KV cannot be handed over: {mine} speaks versions {_span(ours)} of the transfer rules and {its} "
            f"versions {_span(theirs)}. "
            "Upgrade the older one first to a release that speaks one of the other's."
        )
    unknown = sorted(set(theirs.requires) - KNOWN_REQUIREMENTS)
    if unknown:
        raise TransferError(
            f"KV cannot be handed over: {its} requires {', '.join(unknown)}, which {mine} does not know"
        )
    for what, a, b in (
        ("the packing", ours.packing, theirs.packing),
        ("the model's revision", ours.model or theirs.model, theirs.model or ours.model),
        ("the kind of state", ours.state, theirs.state),
        ("the number of layers", ours.num_layers, theirs.num_layers),
        ("the number of KV heads", ours.num_heads, theirs.num_heads),
        ("the head's dimension", ours.head_dim, theirs.head_dim),
        ("the tokens that a recurrent state stands for", ours.state_tokens, theirs.state_tokens),
    ):
        if a != b:
            raise TransferError(
                f"KV cannot be handed over: {what} is {a} on {mine} and {b} on {its}. Serve the same model in both pools."
            )
    is_alike = (ours.dtype, ours.scales) == (theirs.dtype, theirs.scales)
    if not (is_alike if ours.state_tokens else convertible(ours, theirs)):
        raise TransferError(
            f"KV cannot be handed over: {mine} stores {_storage(ours)} and {its} {_storage(theirs)}, between which "
            "there is no conversion"
        )
    return version


def convertible(ours: KVContent, theirs: KVContent) -> bool:
    """Return whether there is a rule that makes vectors of one kind into the other's. Integers mean nothing without scales."""
    known = ours.dtype in DTYPE_BYTES and theirs.dtype in DTYPE_BYTES
    meant = all(
        side.dtype in _FLOATS or side.scales == "vector" or side.dtype.startswith("float8")
        for side in (ours, theirs)
    )
    return (ours.dtype, ours.scales) == (theirs.dtype, theirs.scales) or (known and meant)


def _span(content: KVContent) -> str:
    low, high = content.speaks
    return str(low) if low == high else f"{low} to {high}"


def _storage(content: KVContent) -> str:
    return (
        content.dtype
        if content.scales == "none"
        else f"{content.dtype} with one scale for each {content.scales}"
    )


def content_of_region(region: RegionKey) -> KVContent:
    """Return the holder's description. Releases from before there was one get it made from their layout."""
    if region.content:
        return unpack(region.content)
    return replace(content_of(region.shard), packing=region.name, speaks=(1, 1), software="")


def check_compatible(
    source: KVShard, region: RegionKey, model: str = "", us: str = "prefill", them: str = "decode"
) -> int:
    """Check, as `agree` does, a source shard and a holder's region."""
    theirs = content_of_region(region)
    described = (
        theirs.state,
        theirs.num_layers,
        theirs.head_dim,
        theirs.layers,
        theirs.heads,
        theirs.dtype,
        theirs.scales,
        theirs.state_tokens,
    )
    layout = region.shard.layout
    held = (
        layout.state,
        layout.num_layers,
        layout.head_dim,
        region.shard.layers,
        region.shard.heads,
        layout.dtype,
        layout.scales,
        layout.state_tokens,
    )
    if described != held:
        raise TransferError(f"{them} describes its KV pool as {described} but lays it out as {held}")
    ours = source.layout
    if ours.num_scales and layout.num_scales and (ours.group, ours.kept) != (layout.group, layout.kept):
        raise TransferError(
            f"KV cannot be handed over: {us} has a scale for each {ours.group} numbers and none for {ours.kept}, {them} for each "
            f"{layout.group} and none for {layout.kept}. Serve the same model in both pools."
        )
    return agree(content_of(source, model), theirs, us, them)


def check_grant(grant: Grant) -> None:
    """Raise TransferError for a grant whose blocks do not hold its tokens."""
    if grant.num_tokens <= 0 or grant.first_token < 0 or not grant.regions:
        raise TransferError(
            f"grant {grant.id} is empty: {grant.num_tokens} tokens, {len(grant.regions)} regions"
        )
    for region in grant.regions:
        size = region.shard.layout.block_size
        if size <= 0:
            raise TransferError(f"grant {grant.id} is of blocks that hold {size} tokens")
        if grant.first_token % size or len(grant.block_ids) * size < grant.num_tokens:
            raise TransferError(
                f"grant {grant.id} covers tokens {grant.first_token} to {grant.first_token + grant.num_tokens}, "
                f"which its {len(grant.block_ids)} blocks of {size} do not hold"
            )
        if not all(0 <= block < region.num_blocks for block in grant.block_ids):
            raise TransferError(f"grant {grant.id} names blocks outside a pool of {region.num_blocks}")
