"""The one rank of an encoder's instance: each text is computed whole in the step that it is planned for, and nothing is kept."""

import time
from collections.abc import Sequence

import torch

from core.plan import NewSeq, Sampled, StepPlan, StepResult
from engine.execution.batch.prompt_outputs import pool, vector_bytes
from models.pooling.readout import Readout
from models.registry import Encode


class EncoderRunner:
    def __init__(self, encode: Encode, readout: Readout, device: torch.device) -> None:
        self._encode, self._readout, self._device = encode, readout, device

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """Every work is a new sequence's whole prompt (`StepScheduler`'s `whole_prompts`). The sampled token means nothing."""
        started = time.perf_counter()
        new = {seq.key: seq for seq in plan.new}
        sampled = self._vectors([new[item.key] for item in plan.work])
        return StepResult(step=plan.step, sampled=sampled, duration_s=time.perf_counter() - started)

    def _vectors(self, seqs: Sequence[NewSeq]) -> tuple[Sampled, ...]:
        texts = [torch.tensor(seq.tokens, dtype=torch.int64, device=self._device) for seq in seqs]
        hiddens = self._encode(texts, [seq.sampling.second_text_at for seq in seqs])
        pooled = [pool(hidden, seq.sampling.pooling) for hidden, seq in zip(hiddens, seqs, strict=True)]
        vectors = self._readout(torch.stack(pooled)).cpu()
        return tuple(
            Sampled(seq.key, 0, embedding=vector_bytes(vector))
            for seq, vector in zip(seqs, vectors, strict=True)
        )
