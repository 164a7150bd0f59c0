"""A device whose tokens tell on whoever touches its KV cache: the next token is a hash of every KV byte that is read back.

A token's KV is a hash of all tokens up to it, so a block that is stale, torn, shared by mistake or written by somebody else changes
the sequence's tokens at once."""

import hashlib
import time
from collections.abc import Sequence

import numpy as np

from core.kv import KVLayout, KVShard
from core.plan import NewSeq, Sampled, SeqWork, StepPlan, StepResult
from core.ports import LayerDone, LayerSink

VOCAB_SIZE = 50_000
LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32")
SHARD = KVShard.whole(LAYOUT)
_SEED = b"witness"


def _chain(tokens: Sequence[int]) -> list[bytes]:
    """For each position a hash of the tokens up to it."""
    digests, parent = [], _SEED
    for token in tokens:
        parent = hashlib.blake2b(parent + token.to_bytes(4, "little"), digest_size=16).digest()
        digests.append(parent)
    return digests


def _content(digest: bytes) -> bytes:
    """One token's KV over all layers: (layer, K|V, head, dim) words."""
    return hashlib.shake_128(digest).digest(LAYOUT.token_bytes)


def _sample(kv: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(kv, digest_size=8).digest(), "little") % VOCAB_SIZE


def undisturbed(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """The tokens of a run in which nothing goes wrong."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(_sample(b"".join(_content(digest) for digest in _chain(tokens))))
    return tuple(tokens[len(prompt) :])


class WitnessRank:
    """One rank's `step` for engine.group.InlineGroup. `layer_s`: how long a layer takes."""

    def __init__(self, buffer: memoryview, num_blocks: int, sink: LayerSink | None, layer_s: float) -> None:
        words = np.frombuffer(buffer, np.uint32)
        # (L, N, K|V, H, B, D) -> (L, N, B, K|V, H, D): a token's words of a layer lie together.
        pool = words.reshape(
            LAYOUT.num_layers, num_blocks, 2, LAYOUT.num_kv_heads, LAYOUT.block_size, LAYOUT.head_dim
        )
        self._pool = pool.transpose(0, 1, 4, 2, 3, 5)
        self._sink, self._layer_s = sink, layer_s
        self._seqs: dict[str, list[int]] = {}

    def step(self, plan: StepPlan) -> StepResult:
        started = time.perf_counter()
        for key in plan.drop:
            self._seqs.pop(key, None)
        for new in plan.new:
            self._learn(new)
        layer_done = self._started(plan)
        for copy in plan.copies:
            self._pool[:, copy.dst, : copy.num_tokens] = self._pool[:, copy.src, : copy.num_tokens]
        contents = [self._computed(work) for work in plan.work]
        for layer in range(LAYOUT.num_layers):
            time.sleep(self._layer_s)
            for work, content in zip(plan.work, contents, strict=True):
                blocks, slots = self._places(work, work.start, work.start + work.count)
                self._pool[layer, blocks, slots] = content[:, layer]
            layer_done(0, layer)
        sampled = tuple(self._sample(work) for work in plan.work if work.samples)
        return StepResult(step=plan.step, sampled=sampled, duration_s=time.perf_counter() - started)

    def _started(self, plan: StepPlan) -> LayerDone:
        told = self._sink.step_started(plan) if self._sink is not None else None
        return told or (lambda rank, layer, after=None: None)

    def _learn(self, new: NewSeq) -> None:
        self._seqs[new.key] = list(new.tokens)

    def _computed(self, work: SeqWork) -> np.ndarray:
        """(count, L, K|V, H, D)"""
        digests = _chain(self._seqs[work.key][: work.start + work.count])[work.start :]
        raw = b"".join(_content(digest) for digest in digests)
        return np.frombuffer(raw, np.uint32).reshape(
            work.count, LAYOUT.num_layers, 2, LAYOUT.num_kv_heads, LAYOUT.head_dim
        )

    def _sample(self, work: SeqWork) -> Sampled:
        end = work.start + work.count
        blocks, slots = self._places(work, 0, end)
        kv = self._pool[:, blocks, slots].transpose(1, 0, 2, 3, 4).tobytes()
        token = _sample(kv)
        self._seqs[work.key].append(token)
        return Sampled(work.key, token)

    def _places(self, work: SeqWork, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        span = np.arange(start, end)
        return np.array(work.block_ids)[span // LAYOUT.block_size], span % LAYOUT.block_size
