"""What a step's tokens see: as transformers' masks of Gemma 3 say, however prompts are cut."""

import random
from typing import Any

import numpy as np
import torch
from transformers.masking_utils import (
    and_masks,
    blockwise_overlay,
    causal_mask_function,
    or_masks,
    sliding_window_overlay,
)
from transformers.models.gemma3.modeling_gemma3 import get_block_sequence_ids_for_mask

from core.plan import NewSeq, SeqWork
from core.prompt_images import PromptImage
from core.types import SamplingParams
from engine.execution.batch.batch import RankSeq, build_batch
from engine.planning.whole_runs import missing_runs, uncut
from kernels.torch.paged_attention import PagedAttention
from tests.models.checkpoints import CPU

BLOCK_SIZE, HEADS, SIZE = 4, 2, 8


class Prompt:
    """Texts with images between them, in blocks of its own."""

    def __init__(self, rng: random.Random, first_block: int) -> None:
        kinds: list[int] = []
        spans: list[tuple[int, int]] = []
        for _ in range(rng.randrange(4)):
            kinds += [0] * rng.randint(1, 9)
            spans.append((len(kinds), rng.randint(2, 12)))
            kinds += [1] * spans[-1][1]
        kinds += [0] * rng.randint(1, 9)
        self.kinds, self.size = kinds, len(kinds)
        self.images = tuple(
            PromptImage(bytes([number]), (span,), both_ways=True) for number, span in enumerate(spans)
        )
        self.table = tuple(range(first_block, first_block + -(-self.size // BLOCK_SIZE)))
        params = SamplingParams(max_tokens=1)
        self.seq = RankSeq(NewSeq("k", (1,) * self.size, self.size, params, images=self.images))
        self.q, self.k, self.v = torch.randn(3, self.size, HEADS, SIZE).unbind(0)

    def theirs(self, window: int) -> torch.Tensor:
        """(T, H, D), by transformers' mask."""
        groups = get_block_sequence_ids_for_mask(torch.tensor([self.kinds]))
        sees: Any = or_masks(causal_mask_function, blockwise_overlay(groups))
        if window:
            sees = and_masks(sliding_window_overlay(window), sees)
        each, first = torch.arange(self.size), torch.tensor(0)
        mask = sees(first, first, each[:, None], each[None])
        q, k, v = (x.transpose(0, 1) for x in (self.q, self.k, self.v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1)

    def work(self, rng: random.Random) -> SeqWork:
        """A piece that no run is cut by, which may begin within one."""
        start = rng.randrange(self.size)
        runs = missing_runs(self.images, start)
        count = uncut(runs, start, rng.randint(1, self.size - start), self.size)
        own = tuple(run for run in runs if run[0] < start + count)
        return SeqWork(
            key="k",
            start=start,
            count=count,
            block_ids=self.table,
            samples=False,
            has_image=True,
            both_ways=own,
        )


def test_tokens_see_what_transformers_masks_say() -> None:
    rng = random.Random(3)
    torch.manual_seed(3)
    num_within = 0
    for _ in range(40):
        prompts: list[Prompt] = []
        for _ in range(rng.randint(1, 3)):
            prompts.append(Prompt(rng, prompts[-1].table[-1] + 1 if prompts else 0))
        pool = torch.full((prompts[-1].table[-1] + 1, 2, HEADS, BLOCK_SIZE, SIZE), torch.nan)
        for prompt in prompts:
            at = np.arange(prompt.size)
            blocks = torch.tensor(prompt.table)[at // BLOCK_SIZE]
            pool[blocks, 0, :, at % BLOCK_SIZE] = prompt.k
            pool[blocks, 1, :, at % BLOCK_SIZE] = prompt.v
        work = [prompt.work(rng) for prompt in prompts]
        num_within += any(run[0] == item.start and item.start for item in work for run in item.both_ways)
        meta = build_batch(work, [prompt.seq for prompt in prompts], BLOCK_SIZE, CPU).meta
        for window in (0, 5):
            rows = [
                (prompt.q[item.start :][: item.count], prompt.theirs(window)[item.start :][: item.count])
                for prompt, item in zip(prompts, work, strict=True)
            ]
            q, want = (torch.cat(each) for each in zip(*rows, strict=True))
            got = PagedAttention()(q, pool, meta, SIZE**-0.5, window, 0.0, None)
            torch.testing.assert_close(got, want)
    assert num_within > 3, "some pieces begin within an image"
