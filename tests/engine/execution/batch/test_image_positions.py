"""Positions of images in a plane: transformers' own, however a prompt is cut and wherever it is taken up again."""

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from core.plan import SeqWork
from core.prompt_images import PromptImage
from core.types import Request, SamplingParams
from engine.execution.batch.batch import RankSeq, build_batch
from engine.planning.sequence import Sequence
from tests.models.checkpoints import CPU

BLOCK_SIZE, NUM_OUTPUT = 4, 9
TABLE = tuple(range(200))
Grid = tuple[int, int]


def theirs(num_texts: list[int], grids: list[Grid]) -> torch.Tensor:
    """Return transformers' positions of texts with images between them, (3, T), and of the output behind."""
    kinds: list[int] = []
    for count, grid in zip(num_texts, [*grids, None], strict=True):
        kinds += [0] * count + ([1] * (grid[0] * grid[1]) if grid else [])
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    model: Any = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = partial(Qwen2_5_VLModel.get_vision_position_ids, model)
    positions, delta = Qwen2_5_VLModel.get_rope_index(
        model,
        torch.zeros(1, len(kinds), dtype=torch.int64),
        mm_token_type_ids=torch.tensor([kinds]),
        image_grid_thw=torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in grids] or [[]]),
    )
    output = torch.arange(len(kinds), len(kinds) + NUM_OUTPUT) + delta
    return torch.cat((positions[:, 0], output.expand(3, -1)), 1)


def asked(num_texts: list[int], grids: list[Grid]) -> Request:
    at, images = 0, list[PromptImage]()
    for count, (rows, columns) in zip(num_texts, grids, strict=False):
        images.append(PromptImage(bytes([len(images)]), ((at + count, rows * columns),), columns))
        at += count + rows * columns
    return Request(
        id="a",
        prompt=(7,) * (at + num_texts[-1]),
        sampling=SamplingParams(max_tokens=NUM_OUTPUT),
        reply_to="f",
        images=tuple(images),
    )


def taken_up(request: Request, at: int) -> RankSeq:
    """Return what ranks know of a sequence of which so many tokens are computed."""
    seq = Sequence(request=request, tokens=[*request.tokens], num_prompt=len(request.prompt), arrival=0)
    seq.num_computed = at
    return RankSeq(seq.as_new())


def work(request: Request, start: int, count: int) -> SeqWork:
    shows = any(image.end > start for image in request.images)
    return SeqWork(key="a", start=start, count=count, block_ids=TABLE, samples=False, has_image=shows)


def test_they_are_those_of_transformers_in_any_pieces() -> None:
    rng = random.Random(8)
    in_planes = 0
    for _ in range(150):
        items, seqs, want = list[SeqWork](), list[RankSeq](), list[torch.Tensor]()
        for _ in range(rng.randint(1, 3)):
            grids = [(rng.randint(1, 6), rng.randint(1, 6)) for _ in range(rng.randint(0, 3))]
            texts = [rng.randint(1, 9) for _ in range(len(grids) + 1)]
            request, truth = asked(texts, grids), theirs(texts, grids)
            known = len(request.prompt)
            at = rng.randrange(known)
            seqs.append(taken_up(request, at))
            start = rng.randrange(at, known + NUM_OUTPUT)
            count = rng.randint(1, known - start) if start < known else 1
            items.append(work(request, start, count))
            want.append(truth[:, start : start + count])
        positions = build_batch(items, seqs, BLOCK_SIZE, CPU).positions
        shows = any(image.columns for seq in seqs for image in seq.images)
        in_planes += positions.ndim == 2
        assert shows or positions.ndim == 1, "text needs one position"
        torch.testing.assert_close(positions.expand(3, -1), torch.cat(want, 1))
    assert 20 < in_planes < 130


def test_images_without_a_plane_have_the_positions_of_text() -> None:
    request = asked([3, 4], [(2, 5)])
    flat = Request(
        id="a",
        prompt=request.prompt,
        sampling=request.sampling,
        reply_to="f",
        images=(PromptImage(b"a", ((3, 10),)),),
    )
    positions = build_batch([work(flat, 1, 15)], [taken_up(flat, 0)], BLOCK_SIZE, CPU).positions
    assert positions.tolist() == list(range(1, 16))
