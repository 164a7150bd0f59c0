"""Puts the rows that a vision tower makes of images where a step's tokens stand for them, in place of those tokens' embedding.

An image is computed when the first of its tokens is, and its rows are kept for the chunks that follow and for others that show
it again, as long as there is room. One that cannot be seen fails its own sequences alone."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from core.errors import OutOfMemory
from core.plan import FailedSeq, SeqWork
from core.prompt_images import PromptImage
from engine.execution.batch.batch import RankSeq
from engine.sizing.image_needs import KEPT_ROWS
from models.causal_model import CausalModel
from models.model import Model


class ImageRows:
    def __init__(
        self, embed: Callable[[Tensor], Tensor], see: Callable[[bytes], Tensor], num_deep: int = 0
    ) -> None:
        """`embed`: tokens (T,) -> (T, hidden_size). `see`: an encoded image -> (num_rows, hidden_size * (1 + num_deep)): its
        rows, and what is added to them behind each of the first `num_deep` layers."""
        self._embed, self._see, self._num_deep = embed, see, num_deep
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._num_kept = 0

    @staticmethod
    def are_in(work: Sequence[SeqWork], seqs: Sequence[RankSeq]) -> bool:
        """Return whether any of the step's tokens stands for an image."""
        return any(True for _ in _pieces(work, seqs))

    def embedded(
        self, tokens: Tensor, work: Sequence[SeqWork], seqs: Sequence[RankSeq]
    ) -> tuple[Tensor, tuple[FailedSeq, ...]]:
        """Return (T, hidden_size * (1 + num_deep)) of a step's packed `tokens`, or the tokens themselves where none stands for an
        image; and the sequences with an image that cannot be seen, which are computed without it. All tensor-parallel ranks
        must call it."""
        if not self.are_in(work, seqs):
            return tokens, ()
        x, failed = self._embed(tokens), dict[str, str]()
        if self._num_deep:
            x = F.pad(x, (0, x.shape[1] * self._num_deep))
        for key, image, row, first, count in _pieces(work, seqs):
            try:
                x[row : row + count] = self._rows(image)[first : first + count]
            except _Unseen as error:
                failed[key] = str(error)
        return x, tuple(FailedSeq(key, reason) for key, reason in failed.items())

    def _rows(self, image: PromptImage) -> Tensor:
        """Raises _Unseen."""
        key = image.digest
        rows = self._kept.get(key)
        if rows is None:
            rows = self._seen(image)
            self._keep(key, rows)
        self._kept.move_to_end(key)
        return rows

    def _seen(self, image: PromptImage) -> Tensor:
        """Return the image's rows. Raises _Unseen for every error of its decoder, its processor and the tower: they work for
        other images, so this one is the cause."""
        try:
            rows = self._see(image.data)
        except (OutOfMemory, torch.cuda.OutOfMemoryError):
            raise
        except Exception as error:
            raise _Unseen(f"an image cannot be read by the instance that computes it: {error}") from error
        if len(rows) != image.num_rows:
            raise _Unseen(
                f"an image has {len(rows)} rows on the instance that computes it, and {image.num_rows} tokens stand for it: "
                "its software differs from the ingress'"
            )
        return rows

    def _keep(self, key: bytes, rows: Tensor) -> None:
        self._kept[key] = rows
        self._num_kept += len(rows)
        while self._num_kept > KEPT_ROWS and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._num_kept -= len(oldest)


class _Unseen(Exception):
    """Says why."""


def _pieces(
    work: Sequence[SeqWork], seqs: Sequence[RankSeq]
) -> Iterator[tuple[str, PromptImage, int, int, int]]:
    """Yield (sequence, image, row of the step, row of the image, number of rows) of each run of an image that the step
    computes."""
    at = 0
    for item, seq in zip(work, seqs, strict=True):
        end = item.start + item.count
        for image in seq.images if item.has_image else ():
            first = 0
            for start, count in image.spans:
                low, high = max(start, item.start), min(start + count, end)
                if low < high:
                    yield item.key, image, at + low - item.start, first + low - start, high - low
                first += count
        at += item.count


def make_image_rows(folder: Path, model: CausalModel, device: torch.device) -> ImageRows | None:
    """Load what sees where the model's first layer is. Raises ConfigError and UnsupportedModel."""
    vision = model.spec.vision
    if vision is None or not model.is_first:
        return None
    from models.vision.tower import VisionTower  # noqa: PLC0415 (seconds, which models without images do not need)

    assert isinstance(model, Model), "transformers computes no layers of a model that reads images"
    tower = VisionTower(folder, model.spec, model.dtype, device)
    return ImageRows(model.embed, tower.rows, vision.num_deep)
