"""A model that leaves its device keeps its content, and its tensors stay the objects that they are."""

from functools import partial
from typing import Any

import pytest
import torch

from core.start_timer import StartTimer
from engine.execution.kept_model import KeptModel, storages_of

CPU = torch.device("cpu")


class Model:
    """It has tensors in every way in which a model may have them."""

    __slots__ = ("_slotted", "bound", "layers", "named", "view")

    def __init__(self) -> None:
        self.layers = [torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)]
        self.named = {"a": (torch.arange(100.0),)}
        self.view = self.named["a"][0][10:20]
        self._slotted = torch.full((3, 5), 7, dtype=torch.int8)
        inner = torch.arange(6.0)
        self.bound = partial(lambda scale, more: inner * scale + more, 2.0, more=torch.ones(6))

    def tensors(self) -> list[torch.Tensor]:
        weights = [weight.data for layer in self.layers for weight in (layer.weight, layer.bias)]
        return [*weights, self.named["a"][0], self.view, self._slotted, self.bound()]


def kept(model: Any) -> KeptModel[Any]:
    holder = KeptModel[Any]()
    holder.model(lambda: model, StartTimer("pool"))
    return holder


@torch.inference_mode()
def test_a_model_is_emptied_and_comes_back_as_it_was() -> None:
    model = Model()
    want = [tensor.clone() for tensor in model.tensors()]
    pointers = [id(model.view), id(model.layers[0].weight)]
    holder, timer = kept(model), StartTimer("pool")
    storages = list(storages_of(model, CPU))
    assert sum(storage.nbytes() for storage in storages) >= (64 + 8 + 32 + 4 + 100 + 6 + 6) * 4 + 15
    for _ in range(2):
        holder.move(CPU)
        assert not any(storage.nbytes() for storage in storages), "its memory is given back"
        assert holder.model(lambda: pytest.fail("it is there"), timer) is model
        assert all(torch.equal(one, other) for one, other in zip(model.tensors(), want, strict=True))
    assert pointers == [id(model.view), id(model.layers[0].weight)]
    assert "copying" in dict(timer.times().phases), "a waking says how long it took"


def test_a_tensor_that_two_share_moves_once() -> None:
    model = Model()
    storages = list(storages_of([model, model, model.view], CPU))
    assert len({storage.data_ptr() for storage in storages}) == len(storages)


def test_a_model_on_a_processor_stays_where_it_is() -> None:
    model = Model()
    holder = kept(model)
    holder.rest(CPU)
    assert all(storage.nbytes() for storage in storages_of(model, CPU))
    assert holder.is_kept


def test_what_was_forgotten_is_loaded_again() -> None:
    first, second = Model(), Model()
    holder = kept(first)
    holder.forget()
    assert not holder.is_kept
    assert holder.model(lambda: second, StartTimer("pool")) is second
