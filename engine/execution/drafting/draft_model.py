"""Draft tokens by a small model of its own weights and its own KV, on the rank that samples, before each step that asks for some.

It reads nothing but tokens. So what it has not seen of a sequence, it can read whenever it is asked."""

from collections.abc import Sequence

import torch

from core.plan import SeqWork, StepPlan
from engine.execution.batch.batch import RankSeq, build_batch
from engine.execution.drafting.draft_kv import DraftBlocks, DraftSeq
from engine.execution.drafting.proposing import Proposal, sample_drafts
from engine.sizing.draft_size import CATCH_UP_TOKENS
from kernels.ops import KVLayer
from models.causal_model import CausalModel

_FEW_TOKENS = 16
"""A sequence of which the draft model has not seen more is read, which says nothing of how long draft tokens take."""
_CPU = torch.device("cpu")


class DraftModel:
    """A `Proposer`."""

    def __init__(
        self,
        model: CausalModel,
        layers: list[KVLayer],
        block_size: int,
        vocab_size: int,
        *,
        device: torch.device = _CPU,
        most_read: int = CATCH_UP_TOKENS,
    ) -> None:
        """`layers` are a pool's of as many blocks as the target's. `vocab_size` is the target's. `most_read`: tokens before one
        step."""
        self._model, self._layers = model, layers
        self._block_size, self._vocab_size, self._most_read = block_size, vocab_size, most_read
        self._device = device
        self._blocks = DraftBlocks(block_size)
        self._seqs: dict[str, DraftSeq] = {}

    def begin(self, key: str, seq: RankSeq) -> None:
        self._seqs[key] = DraftSeq(seq, self._blocks)

    def end(self, key: str) -> None:
        self._seqs.pop(key, None)

    def hear(self, hidden: torch.Tensor) -> None:
        """Do nothing: it reads tokens."""

    def computed(self, plan: StepPlan) -> None:
        """Do nothing: it reads a sequence when it is asked."""

    @torch.inference_mode()
    def propose(self, asked: Sequence[Proposal]) -> bool:
        missing = [one.seq.num_tokens - self._seqs[one.key].find(one.block_ids) for one in asked]
        going = self._read(asked)
        while going := [one for one in going if not one.is_done]:
            self._go_on(going)
        return max(missing) > _FEW_TOKENS

    def _read(self, asked: Sequence[Proposal]) -> list[Proposal]:
        """Compute what is missing of the KV of known tokens, as far as there is time. Returns the sequences of which nothing is
        missing any more, each with its first draft token."""
        allowance = self._most_read
        work: list[SeqWork] = []
        reading: list[Proposal] = []
        for one in asked:
            seq, start = one.seq, self._seqs[one.key].find(one.block_ids)
            is_short = seq.num_tokens + len(one.work.drafts) <= self._model.spec.max_context_tokens
            if (count := min(seq.num_tokens - start, allowance)) <= 0 or not is_short:
                continue
            allowance -= count
            reading.append(one)
            work.append(_piece(one, start, count, samples=start + count == seq.num_tokens))
        if not reading:
            return []
        to_sample = [one for one, item in zip(reading, work, strict=True) if item.samples]
        self._sample(reading, work, to_sample)
        for one, item in zip(reading, work, strict=True):
            self._seqs[one.key].computed(item.count, one.block_ids)
        return to_sample

    def _go_on(self, going: Sequence[Proposal]) -> None:
        """Propose the token behind each one's last draft token."""
        work: list[SeqWork] = []
        for one in going:
            self._seqs[one.key].drafted(one.drafts[-1], one.block_ids)
            work.append(_piece(one, one.seq.num_tokens + len(one.drafts) - 1, 1, samples=True))
        self._sample(going, work, going)

    def _sample(
        self, computed: Sequence[Proposal], work: Sequence[SeqWork], to_sample: Sequence[Proposal]
    ) -> None:
        """Compute `work`, and give each of `to_sample` one more draft token."""
        batch = build_batch(work, [one.seq for one in computed], self._block_size, self._device)
        tokens = batch.tokens
        if (known := self._model.spec.vocab_size) < self._vocab_size:
            tokens = torch.where(tokens < known, tokens, 0)  # it has no such tokens
        hidden = self._model.forward(tokens, batch.positions, self._layers, batch.meta)
        if to_sample:
            logits = _wide(self._model.logits(batch.sampled(hidden)), self._vocab_size)
            sample_drafts(to_sample, logits, self._model.ops)


def _piece(one: Proposal, start: int, count: int, *, samples: bool) -> SeqWork:
    return SeqWork(key=one.key, start=start, count=count, block_ids=one.block_ids, samples=samples)


def _wide(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the logits of the target's tokens: of those that the draft model lacks none is sampled."""
    missing = vocab_size - logits.shape[1]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits
