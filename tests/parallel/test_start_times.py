"""What each instance says of its start, from its ranks to the metrics: the phases, which add up, and the bytes that were read."""

import logging
import random
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel

from cluster.ingress.telemetry.metrics import InstanceMetrics
from cluster.local import LocalCluster
from core.reports import Status
from tests.models.checkpoints import FAMILIES, make
from tests.models.encoder_checkpoints import FIELDS
from tests.parallel.families import awkward
from tests.parallel.test_served import STATES, settings

ALWAYS = {"sizes", "kernels", "reading", "packing", "pool", "graphs", "grammars", "vision", "draft"}
OF_SEVERAL = {"ranks", "meeting"}
OF_TRANSFORMERS = {"imports", "checking"}
LOGGER = "cluster.instance.instance"
TWO_RANKS = {"prefill.tp": 2}
slow = (pytest.mark.slow, pytest.mark.timeout(240))


def checkpoint(folder: Path, family: str) -> int:
    """Make a small one and return the bytes of its tensors."""
    config = FAMILIES[family](random.Random(1), 1) if family in FAMILIES else awkward(family)
    make(folder, config, seed=1)
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    return sum(tensor.nbytes for tensors in files for tensor in tensors.values())


def encoder(folder: Path) -> None:
    AutoModel.from_config(AutoConfig.for_model("bert", **FIELDS["bert"])).save_pretrained(folder)


def exported(status: Status) -> dict[tuple[str, str], float]:
    """The metric's seconds, by (address, phase)."""
    registry = CollectorRegistry()
    InstanceMetrics(registry, "m").update(status)
    return {
        (sample.labels["address"], sample.labels["phase"]): sample.value
        for metric in registry.collect()
        if metric.name == "baton_instance_start_seconds"
        for sample in metric.samples
    }


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("family", "keys"),
    [
        pytest.param("mistral", {}, id="one rank"),
        pytest.param("mistral", TWO_RANKS, id="two ranks", marks=slow),
        pytest.param("qwen3_next", STATES, id="recurrent layers"),
        pytest.param("qwen3_next", {**STATES, **TWO_RANKS}, id="recurrent layers on two ranks", marks=slow),
        pytest.param("mistral", {"model.implementation": "transformers"}, id="transformers"),
    ],
)
async def test_phases_add_up_and_reach_the_log_and_the_metrics(
    family: str, keys: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    num_bytes = checkpoint(tmp_path, family)
    logger = logging.getLogger(LOGGER)
    caplog.set_level(logging.INFO, LOGGER)
    logger.addHandler(caplog.handler)
    began = time.perf_counter()
    async with LocalCluster.running(settings(tmp_path, **keys)) as cluster:
        status = await cluster.frontend.status()
    elapsed_s = time.perf_counter() - began
    logger.removeHandler(caplog.handler)

    assert len(status.instances) == 2
    assert sum(one.start.whole_s for one in status.instances) <= elapsed_s
    metrics = exported(status)
    for one in status.instances:
        expected = ALWAYS | (OF_TRANSFORMERS if "model.implementation" in keys else set())
        several = "prefill.tp" in keys and one.prefills
        phases = dict(one.start.phases)
        assert set(phases) == expected | (OF_SEVERAL if several else set())
        assert all(seconds >= 0 for seconds in phases.values())
        assert phases["reading"] > 0 < phases["packing"]
        assert {phase: metrics[one.address, phase] for phase in phases} == phases
        assert num_bytes <= one.start.bytes_read <= num_bytes * (2 if several else 1)
    assert sorted({record.getMessage() for record in caplog.records if record.name == LOGGER}) == sorted(
        f"the {'prefill' if one.prefills else 'decode'} instance {one.address} has started in {one.start.summary()}"
        for one in status.instances
    )


async def test_an_encoders_phases_are_those_that_it_has(tmp_path: Path) -> None:
    encoder(tmp_path)
    async with LocalCluster.running(settings(tmp_path)) as cluster:
        status = await cluster.frontend.status()
    (starts,) = {frozenset(dict(one.start.phases)) for one in status.instances}
    assert starts == (ALWAYS | OF_TRANSFORMERS) - {"graphs", "grammars", "vision", "draft"}
    assert all(one.start.bytes_read > 0 for one in status.instances)
