"""What each rank of a model needs beside its KV pool, worked out from the model's description alone: no weight is read."""

from core.config.cluster_config import EngineConfig
from core.cost.memory_model import RankNeeds
from engine.sizing.model_dims import dims_of, input_table, mixer_weights
from engine.sizing.stored_weights import Stored
from models.spec.compressed_spec import CompressedSpec
from models.spec.model_spec import ModelSpec
from models.spec.recurrent_spec import RecurrentSpec
from parallel.mesh import Mesh
from parallel.plans import ModelShare, even_part, part_of

_FLOAT, _DOUBLE, _PLACE = 4, 8, 8
_GPU_SCORES, _CPU_NUMBERS = 1 << 24, 1 << 19
"""Scores of tokens, or numbers on the way to them, that exist at one time (`kernels/triton/token_index.py` and
`kernels/torch/token_index.py`), unless one query takes more."""
_SCORE_BYTES = 24
"""A score, and what is chosen by: whether it is among the highest, which of them it is, and its token."""
_COMPRESSED_NUMBERS = 1 << 22
"""Numbers of the largest tensor of attention to entries (`models/layers/compressed_attention.py`)."""
_CHUNK_TOKENS = 64
"""The number of tokens between which a recurrent layer computes products (`kernels/torch/recurrent.py`)."""
_TILE_TOKENS = 128
"""The number of queries that PyTorch's attention computes at once on a CPU."""


def needs_of(
    spec: ModelSpec,
    engine: EngineConfig,
    mesh: Mesh,
    stored: Stored,
    *,
    context_tokens: int,
    num_spare: int = 0,
    num_weights: int = 0,
) -> list[RankNeeds]:
    """Return the needs of each rank. `context_tokens` is the length of the longest sequence and `num_spare` is as in
    `parallel.plans.check`. `num_weights` is the number of weights of a model whose layers its description does not tell."""
    dims = dims_of(spec)
    shares = [part_of(dims, mesh, rank) for rank in range(mesh.size)]
    return [
        RankNeeds(
            weight_bytes=_counted_bytes(spec, num_weights, mesh.tp, share, stored)
            if num_weights
            else _weight_bytes(spec, mesh, rank, share, stored, num_spare),
            step_bytes=_step_bytes(spec, engine, mesh, share, stored, context_tokens),
        )
        for rank, share in enumerate(shares)
    ]


def _counted_bytes(spec: ModelSpec, num_weights: int, tp: int, share: ModelShare, stored: Stored) -> int:
    """Count all weights but the embedding as matrices of layers that are alike, which `tp` ranks share. A head that is tied to
    the embedding is packed beside it."""
    table = spec.vocab_size * spec.hidden_size
    rest = num_weights - table * (1 if spec.tied else 2)
    if spec.encodes:
        return int(rest * stored.matrix + table * stored.other)
    matrices = rest * stored.matrix * _size(share.layers) / spec.num_layers
    if share.layers[1] == spec.num_layers:
        matrices += table * stored.head
    return int(matrices / tp + table * stored.other * (share.layers[0] == 0))


def _weight_bytes(
    spec: ModelSpec, mesh: Mesh, rank: int, share: ModelShare, stored: Stored, num_spare: int
) -> int:
    total = 0.0
    for layer in range(*share.layers):
        total += mixer_weights(spec, layer, _size(share.heads), _size(share.kv_heads)) * stored.matrix
        total += _feed_forward_bytes(spec, mesh, mesh.place(rank).tp, layer, stored, num_spare)
    table = _size(share.vocab) * spec.hidden_size
    is_first, is_last = share.layers[0] == 0, share.layers[1] == spec.num_layers
    total += table * stored.embedding * is_first
    if spec.layer_inputs is not None:
        total += input_table(spec) * _size(share.vocab) / spec.vocab_size * stored.embedding
        total += spec.layer_inputs.size * spec.num_layers * spec.hidden_size * stored.matrix
    shares_head = spec.tied and is_first and stored.shares_head
    if is_last and not shares_head:
        total += table * stored.head
    return int(total)


def _feed_forward_bytes(
    spec: ModelSpec, mesh: Mesh, tp: int, layer: int, stored: Stored, num_spare: int
) -> float:
    if not spec.has_mlp(layer):
        return 0
    hidden, moe, matrices = spec.hidden_size, spec.moe, spec.num_ups + 1
    dense = matrices * hidden * _size(even_part(spec.mlp_size(layer), mesh.tp, tp)) * stored.matrix
    inputs = 0 if spec.layer_inputs is None else 2 * hidden * spec.layer_inputs.size * stored.matrix
    if moe is None or not moe.sparse[layer]:
        return dense + inputs
    slots = (moe.num_experts + num_spare) / mesh.num_expert_ranks
    width = _size(even_part(moe.intermediate_size, mesh.tp, tp))
    shared = _size(even_part(moe.shared_size, mesh.tp, tp)) if moe.shared_size else 0
    beside = hidden * moe.num_experts * _FLOAT + dense * moe.beside_dense + inputs
    beside += hidden * (matrices * shared + 2 * moe.latent_size) * stored.matrix
    return matrices * spec.expert_inputs * slots * width * stored.expert + beside


def _step_bytes(
    spec: ModelSpec, engine: EngineConfig, mesh: Mesh, share: ModelShare, stored: Stored, context_tokens: int
) -> int:
    """Return the bytes of tensors that live at once in the largest step: the residual stream, and the most that a layer's two
    halves and the sampling of tokens have beside it."""
    tokens, wide = engine.max_batch_tokens, stored.other
    residual = tokens * spec.hidden_size * (3 * wide + _FLOAT)
    # Cosines and sines, where layers rotate in several ways; those of one way are among attention's vectors.
    ways = sum(rope not in spec.layer_ropes[:at] for at, rope in enumerate(spec.layer_ropes))
    residual += tokens * ways * 2 * _widest(spec) * _FLOAT
    if spec.layer_inputs is not None:
        # The layers' inputs, the two that they are sums of, and what these were before they were scaled.
        residual += tokens * spec.num_layers * spec.layer_inputs.size * (4 * wide + _FLOAT)
    halves = [_attention_bytes(spec, tokens, share, stored, context_tokens)]
    halves[0] += _eight_bit_bytes(spec, engine, stored, context_tokens)
    halves += [_inner_bytes(spec, tokens, mesh, wide)]
    if spec.compressed is not None:
        halves[0] += _compressed_bytes(spec, spec.compressed, engine, context_tokens, wide)
    if spec.streams is not None:
        residual *= 2 * spec.streams.num_streams
    if spec.recurrent is not None:
        num_ranks = mesh.tp if spec.mla is None else 1
        halves.append(_recurrent_bytes(spec.recurrent, num_ranks, engine.max_num_seqs, tokens, wide))
    if share.layers[1] == spec.num_layers and not spec.encodes:
        rows = min(engine.max_num_seqs, tokens)
        # Logits, those as the model gave them, and their log-probabilities; PyTorch samples by probabilities' running sums.
        sampling = 0 if stored.samples_natively else 2 * _DOUBLE
        halves.append(rows * spec.vocab_size * (wide + 3 * _FLOAT + sampling))
    kept = _kept_bytes(spec, engine, mesh, share, wide) + _cache_bytes(spec, wide, context_tokens)
    return residual + max(halves) + kept


def _cache_bytes(spec: ModelSpec, wide: int, context_tokens: int) -> int:
    """Return the bytes of one sequence's cache where transformers attends: what is read from the pool, with what a step adds to
    it in a second copy."""
    if (cache := spec.cache) is None:
        return 0
    token_bytes = 2 * cache.num_layers * cache.num_kv_heads * cache.head_dim * wide
    return 2 * (context_tokens * token_bytes * cache.grows + cache.state_bytes)


def _attention_bytes(
    spec: ModelSpec, tokens: int, share: ModelShare, stored: Stored, context_tokens: int
) -> int:
    heads, kv_heads, dim = _size(share.heads), _size(share.kv_heads), _widest(spec)
    if spec.kv is not None:
        # As many of the widest heads as the layer with the most keys would have; a row is copied once more.
        kv_heads = -(-spec.kv.pool_heads * spec.kv.vector_dim * kv_heads // (spec.kv.cut_heads * dim))
    copies = int(spec.kv is not None)
    vectors = tokens * ((3 + copies) * heads + (4 + 2 * copies) * kv_heads) * dim * stored.other
    if spec.qk_norm != "none":
        vectors += tokens * (heads + kv_heads) * dim * 2 * _FLOAT
    vectors += _choosing_bytes(spec, tokens, heads, stored, context_tokens)
    if not stored.on_cpu:
        return vectors
    if stored.attends_natively:
        # Queries before and behind their turn, and results, as floats; and a pool of float8 made floats.
        floats = 3 * tokens * heads + 2 * context_tokens * kv_heads
        return vectors + floats * dim * _FLOAT
    if spec.mla is not None and spec.mla.index is not None:
        # Queries that see more tokens than they may choose do not attend to all of them.
        context_tokens = min(context_tokens, spec.mla.index.top_k)
    # One sequence's context is gathered. Where PyTorch's own attention has no name for the scores, they are written out for a
    # tile of queries, from keys and values repeated for each query head.
    latent = 0 if spec.mla is None else spec.mla.latent_size
    gathered = context_tokens * (latent or 2 * (1 + copies) * kv_heads * dim) * stored.other
    scores = min(tokens, _TILE_TOKENS) * context_tokens * _FLOAT
    masks = 2 * len(set(spec.windows)) * scores
    if spec.mla is None and not spec.sinks and not spec.attention_soft_cap:
        return vectors + gathered + masks
    if spec.mla is not None:
        return vectors + gathered + masks + 3 * heads * scores
    repeated = 2 * heads * context_tokens * dim * stored.other
    return vectors + gathered + masks + repeated + 4 * heads * scores


def _eight_bit_bytes(spec: ModelSpec, engine: EngineConfig, stored: Stored, context_tokens: int) -> int:
    """Return the bytes that a CPU takes to make latents of 8 bits floats: those of one sequence, or of a run of queries, as they
    are stored, their parts, and both together."""
    if spec.mla is None or engine.kv_dtype == "auto" or not stored.on_cpu:
        return 0
    return max(context_tokens * spec.mla.token_size, _CPU_NUMBERS) * 4 * _FLOAT


def _choosing_bytes(spec: ModelSpec, tokens: int, heads: int, stored: Stored, context_tokens: int) -> int:
    """Return the bytes that choosing tokens takes: index queries, queries and results in the latent space, scores of a run of
    queries with what is chosen by, and on a CPU their products of each index head, and what a run of queries has chosen."""
    if (mla := spec.mla) is None or (index := mla.index) is None:
        return 0
    rows = index.num_heads * (index.head_dim * 3 * stored.other + 2 * _FLOAT)
    rows += index.top_k * 2 * _PLACE + 2 * heads * mla.latent_size * stored.other
    if not stored.on_cpu:
        scores = max(context_tokens, min(tokens * context_tokens, _GPU_SCORES))
        return tokens * rows + scores * _SCORE_BYTES
    keys = context_tokens * index.head_dim * (stored.other + _FLOAT)
    scored = _run(tokens, index.num_heads * context_tokens) * context_tokens
    scores = scored * (2 * index.num_heads * _FLOAT + _SCORE_BYTES)
    chosen = _run(tokens, index.top_k * mla.latent_size) * index.top_k
    return tokens * rows + keys + max(scores, chosen * (mla.latent_size * stored.other + 2 * heads * _FLOAT))


def _compressed_bytes(
    spec: ModelSpec, kept: CompressedSpec, engine: EngineConfig, context_tokens: int, wide: int
) -> int:
    """Return the bytes that entries take in a step, in the layer with the most: rows and weights of all windows that its tokens
    are in, twice while they are summed up; states; and one sequence's entries with the scores of a run of queries."""
    tokens, most = engine.max_batch_tokens, 0
    for layer, rate in enumerate(kept.rates):
        if not rate:
            continue
        size, series = kept.entry_size(layer), 1 + kept.chooses[layer]
        windows = -(-tokens // rate) + min(engine.max_num_seqs, tokens)
        summed = windows * (rate + 1) * series * size * 4 * _FLOAT
        seen = context_tokens // rate * size * 3 * wide
        states = 3 * min(engine.max_num_seqs, tokens) * kept.state_rows(layer) * size * _FLOAT
        most = max(most, summed + seen + states)
    return most + 6 * _COMPRESSED_NUMBERS * _FLOAT


def _run(tokens: int, numbers: int) -> int:
    """Return how many queries of so many numbers each a CPU takes at once."""
    return max(1, min(tokens, _CPU_NUMBERS // numbers))


def _recurrent_bytes(kept: RecurrentSpec, num_ranks: int, num_seqs: int, tokens: int, wide: int) -> int:
    """Return the bytes of a recurrent layer's rows, which are floats from the convolution on, with what each says of the others
    of its chunk, and of its sequences' states, which are read, made anew and written. A state space has no keys and queries of
    each head. `num_ranks`: among which heads are shared out."""
    shape = kept.held(kept.shape.num_value_heads // num_ranks)
    if "short_convolution" in kept.kinds:
        heads = shape.value_size
    elif "state_space" in kept.kinds:
        heads = shape.num_value_heads * (4 * shape.value_dim + 2 * _CHUNK_TOKENS)
    else:
        heads = 4 * shape.num_value_heads * (2 * shape.key_dim + shape.value_dim + _CHUNK_TOKENS)
    rows = 2 * wide * (shape.conv_channels + shape.value_size) + _FLOAT * (3 * shape.conv_channels + heads)
    if "channel_delta" in kept.kinds:
        # Decays and steps, and gates of each channel.
        rows += 6 * _FLOAT * shape.value_size
    return tokens * rows + 4 * min(num_seqs, tokens) * shape.num_floats * _FLOAT


def _kept_bytes(spec: ModelSpec, engine: EngineConfig, mesh: Mesh, share: ModelShare, wide: int) -> int:
    """Return the bytes that recurrent layers keep of draft tokens until it is known which were right: what goes into their
    states."""
    if (kept := spec.recurrent) is None:
        return 0
    shape = kept.held(kept.shape.num_value_heads // (mesh.tp if spec.mla is None else 1))
    num_decays = shape.value_size if "channel_delta" in kept.kinds else shape.num_value_heads
    num_layers = sum(kept.has_state[slice(*share.layers)])
    drafts = min(max(engine.max_num_seqs, engine.speculate_tokens), engine.max_batch_tokens)
    return num_layers * drafts * (wide * shape.conv_channels + _FLOAT * (num_decays + shape.num_value_heads))


def _inner_bytes(spec: ModelSpec, tokens: int, mesh: Mesh, wide: int) -> int:
    """Return the bytes of the inner rows of the widest MLP: gates and ups, or ups alone, beside
    what they become, for each chosen expert of a mixture."""
    rows = spec.num_ups + 1
    inner = -(-max(spec.mlp_sizes, default=spec.intermediate_size) // mesh.tp) * rows
    if (moe := spec.moe) is None:
        return tokens * inner * wide
    width = -(-moe.intermediate_size // mesh.tp)
    chosen = moe.routing.top_k * (rows * width + 2 * spec.expert_inputs)
    shared = rows * -(-moe.shared_size // mesh.tp)
    dense = 0 if all(moe.sparse) and not moe.beside_dense else inner
    return tokens * (max(dense, chosen + shared) * wide + 2 * spec.hidden_size * _FLOAT)


def _widest(spec: ModelSpec) -> int:
    return spec.head_dim if spec.kv is None else max(heads.head_dim for heads in spec.kv.heads)


def _size(span: tuple[int, int]) -> int:
    return span[1] - span[0]
