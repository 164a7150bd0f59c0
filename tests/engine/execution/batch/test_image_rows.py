"""Rows of images in a step: each where its token is, however the prompt is cut, and computed once."""

import random
from dataclasses import replace

import pytest
import torch

from core.errors import OutOfMemory
from core.plan import NewSeq, SeqWork
from core.prompt_images import PromptImage
from core.types import SamplingParams
from engine.execution.batch.batch import RankSeq
from engine.execution.batch.image_rows import ImageRows
from engine.sizing.image_needs import KEPT_ROWS

HIDDEN = 3


class Tower:
    def __init__(self, num_rows: dict[bytes, int]) -> None:
        self._num_rows, self.asked = num_rows, list[bytes]()

    def __call__(self, data: bytes) -> torch.Tensor:
        """Row i of an image is its first byte plus i / 1000."""
        self.asked.append(data)
        rows = data[0] + torch.arange(self._num_rows[data]) / 1000
        return rows[:, None].expand(-1, HIDDEN)


def embed(tokens: torch.Tensor) -> torch.Tensor:
    return -tokens[:, None].float().expand(-1, HIDDEN).clone()


def seq(num_tokens: int, *images: PromptImage) -> RankSeq:
    tokens = tuple(range(num_tokens))
    return RankSeq(NewSeq("k", tokens, num_tokens, SamplingParams(max_tokens=1), images=images))


def work(start: int, count: int) -> SeqWork:
    return SeqWork(key="k", start=start, count=count, block_ids=(), samples=False, has_image=True)


def test_rows_are_where_their_tokens_are_however_a_prompt_is_cut() -> None:
    a, b = PromptImage(b"\x40", ((2, 3), (6, 4))), PromptImage(b"\x50", ((10, 1),))
    one, text, other = seq(14, a, b), seq(6), seq(9, PromptImage(b"\x60", ((0, 9),)))
    want = {
        id(one): [0, -1, 64, 64.001, 64.002, -5, 64.003, 64.004, 64.005, 64.006, 80, -11, -12, -13],
        id(text): [-float(at) for at in range(6)],
        id(other): [96 + at / 1000 for at in range(9)],
    }
    rng = random.Random(4)
    for _ in range(200):
        tower = Tower({b"\x40": 7, b"\x50": 1, b"\x60": 9})
        rows, expected, tokens, items, seqs = ImageRows(embed, tower), [], [], [], []
        for each in rng.sample([one, text, other], 3):
            start = rng.randrange(each.num_tokens)
            count = rng.randint(1, each.num_tokens - start)
            items.append(work(start, count))
            seqs.append(each)
            tokens += each.tokens[start : start + count].tolist()
            expected += want[id(each)][start : start + count]
        packed = torch.tensor(tokens)
        found, failed = rows.embedded(packed, items, seqs)
        assert not failed
        if all(value <= 0 for value in expected):
            assert found is packed
            assert not tower.asked
        else:
            torch.testing.assert_close(found[:, 0], torch.tensor(expected))
        assert rows.are_in(items, seqs) == bool(tower.asked)


def test_an_image_is_computed_once_while_there_is_room() -> None:
    sizes = {bytes([number]): KEPT_ROWS // 4 for number in range(1, 7)}
    tower = Tower(sizes)
    rows = ImageRows(embed, tower)

    def see(number: int, start: int) -> None:
        count = sizes[bytes([number])]
        rows.embedded(
            torch.tensor([0]), [work(start, 1)], [seq(count, PromptImage(bytes([number]), ((0, count),)))]
        )

    for number in (1, 1, 2, 1, 3, 4, 1, 5):
        see(number, number)
    assert [data[0] for data in tower.asked] == [1, 2, 3, 4, 5]
    see(1, 0)
    see(2, 0)
    assert [data[0] for data in tower.asked] == [1, 2, 3, 4, 5, 2], "what was used longest ago is given up"


def test_one_larger_than_the_room_is_kept_while_it_is_used() -> None:
    tower = Tower({b"\x01": 2 * KEPT_ROWS})
    rows = ImageRows(embed, tower)
    whole = seq(2 * KEPT_ROWS, PromptImage(b"\x01", ((0, 2 * KEPT_ROWS),)))
    for start in range(3):
        rows.embedded(torch.tensor([0]), [work(start, 1)], [whole])
    assert len(tower.asked) == 1


def test_one_that_cannot_be_seen_fails_its_own_sequences_alone() -> None:
    """Whether its decoder fails, or it has another number of rows than tokens stand for."""
    tower = Tower({b"\x40": 3, b"\x50": 3})

    def see(data: bytes) -> torch.Tensor:
        if data == b"broken":
            raise RuntimeError("no such codec")
        return tower(data)

    rows = ImageRows(embed, see)
    good, broken, short = (
        PromptImage(b"\x40", ((1, 3),)),
        PromptImage(b"broken", ((0, 2),)),
        PromptImage(b"\x50", ((2, 2),)),
    )
    seqs = [seq(5, good), seq(5, good, broken), seq(4, short), seq(5, broken)]
    items = [replace(work(0, each.num_tokens), key=str(number)) for number, each in enumerate(seqs)]
    items[3] = replace(items[3], start=2, count=3)
    found, failed = rows.embedded(torch.arange(17), items, seqs)
    torch.testing.assert_close(found[:5, 0], torch.tensor([0, 64, 64.001, 64.002, -4]))
    assert [failure.key for failure in failed] == ["1", "2"], "the last one computes nothing of its image"
    assert failed[0].reason == "an image cannot be read by the instance that computes it: no such codec"
    assert "3 rows on the instance that computes it, and 2 tokens" in failed[1].reason


def test_memory_is_not_the_images_fault() -> None:
    def see(data: bytes) -> torch.Tensor:
        raise OutOfMemory("none is left")

    with pytest.raises(OutOfMemory):
        ImageRows(embed, see).embedded(
            torch.tensor([0]), [work(0, 1)], [seq(2, PromptImage(b"a", ((0, 2),)))]
        )
