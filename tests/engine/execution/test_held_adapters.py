"""What a rank has of adapters that come and go: the logits of PEFT while they are there, and nothing of them behind that."""

import gc
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config.adapter_config import AdapterPlace, HoldAdapters
from engine.execution.held_adapters import HeldAdapters
from models.families.table import read_spec
from models.lora.adapter import read_within
from models.registry import LoadOptions, load_model
from tests.models.checkpoints import CPU, FAMILIES, Paged, make
from tests.models.peft_adapters import LINEAR, make_adapter

TOKENS = [5, 9, 17, 33, 2, 40, 41]


@dataclass(frozen=True, slots=True)
class Made:
    folder: Path
    truths: dict[str, Any]
    """By name; the model as it is has the empty one."""

    def place(self, name: str) -> AdapterPlace:
        folder = str(self.folder / name)
        adapter = read_within(name, folder, [str(self.folder)], 64, read_spec(self.folder / "base"))
        return AdapterPlace(adapter.key, folder)

    def asked(self, *places: AdapterPlace, max_rank: int = 8) -> HoldAdapters:
        return HoldAdapters(places, (str(self.folder),), max_rank)


TARGETS = {"llama": LINEAR, "glm": (*LINEAR[:4], "gate_up_proj", "down_proj")}
"""glm's queries and keys are put in another order as they are read."""


@pytest.fixture(scope="module", params=sorted(TARGETS))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp(request.param)
    reference = make(folder / "base", FAMILIES[request.param](random.Random(1), 0), seed=1)
    truths = {
        name: make_adapter(folder / name, reference, seed, targets=TARGETS[request.param])
        for seed, name in enumerate(("one", "two"))
    }
    return Made(folder, {"": reference, **truths})


@torch.inference_mode()
def agrees(model: Any, truth: Any, key: str) -> bool:
    (found,) = Paged(model, 1, random.Random(0)).step([(0, 0, TOKENS)], adapters={0: key} if key else None)
    want = truth(input_ids=torch.tensor([TOKENS])).logits[0]
    return torch.allclose(found, want, atol=2e-4, rtol=1e-3)


def test_they_come_and_go(made: Made) -> None:
    model = load_model(made.folder / "base", "float32", CPU)
    held, one, two = HeldAdapters(model), made.place("one"), made.place("two")
    assert held.hold(made.asked(one)) == {}
    assert agrees(model, made.truths["one"], one.key)
    assert agrees(model, made.truths[""], "")
    assert held.hold(made.asked(one, two)) == {}
    assert agrees(model, made.truths["two"], two.key)
    assert agrees(model, made.truths["one"], one.key)
    assert held.hold(made.asked(two)) == {}
    assert one.key not in model.adapters
    assert agrees(model, made.truths[""], one.key), "nothing of it is left"
    assert agrees(model, made.truths["two"], two.key)
    assert held.hold(made.asked()) == {}
    assert not model.adapters


def test_those_of_the_start_stay(made: Made) -> None:
    paths = {"one": str(made.folder / "one")}
    model = load_model(made.folder / "base", "float32", CPU, options=LoadOptions(adapters=paths))
    held, two = HeldAdapters(model), made.place("two")
    held.hold(made.asked(two))
    held.hold(made.asked())
    assert agrees(model, made.truths["one"], made.place("one").key)
    assert two.key not in model.adapters


def test_memory_is_given_back(made: Made) -> None:
    model = load_model(made.folder / "base", "float32", CPU)
    held, one = HeldAdapters(model), made.place("one")
    before = count_tensors()
    held.hold(made.asked(one))
    assert count_tensors() > before
    held.hold(made.asked())
    assert count_tensors() == before


def count_tensors() -> int:
    gc.collect()
    return sum(type(each) is torch.Tensor for each in gc.get_objects())


def test_what_cannot_be_loaded_is_said_and_the_others_are_there(made: Made, tmp_path: Path) -> None:
    model = load_model(made.folder / "base", "float32", CPU)
    held, one, two = HeldAdapters(model), made.place("one"), made.place("two")
    elsewhere = AdapterPlace("one@1", str(tmp_path))
    others = AdapterPlace("one@0123", one.folder)
    refused = held.hold(made.asked(one, elsewhere, others))
    assert "adapters.folders" in refused[elsewhere.key]
    assert "are others here, or have changed" in refused[others.key]
    assert len(refused) == 2
    assert agrees(model, made.truths["one"], one.key)
    assert "a rank of 4, and adapters.max_rank is 2" in held.hold(made.asked(one, two, max_rank=2))[two.key]


def test_a_file_that_is_damaged_leaves_nothing(made: Made) -> None:
    """Its header is whole, and some of its tensors are missing."""
    model = load_model(made.folder / "base", "float32", CPU)
    shutil.copytree(made.folder / "one", made.folder / "broken", dirs_exist_ok=True)
    place, file = made.place("broken"), made.folder / "broken" / "adapter_model.safetensors"
    held = HeldAdapters(model)
    file.write_bytes(file.read_bytes()[:-100])
    assert place.key in held.hold(made.asked(place))
    assert not model.adapters
    assert agrees(model, made.truths[""], place.key)
