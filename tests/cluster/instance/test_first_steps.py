"""What `baton profile` measured is what an instance takes its steps to last before its first; another model's is refused."""

import json
from math import log
from pathlib import Path
from typing import Any

import pytest

from cluster.local import LocalCluster
from core.config.cluster_config import load
from core.cost.step_profile import first_steps
from core.errors import ConfigError
from core.kv import KVLayout

LAYOUT = KVLayout(num_layers=6, num_kv_heads=4, head_dim=32, block_size=16, dtype="float32")
DECODE = {"fixed_s": 0.004, "token_s": 0.0, "context_s": 1e-7, "seq_s": 3e-4, "error": 0.02, "num_steps": 40}
PROMPT = {"fixed_s": 0.005, "token_s": 2e-4, "context_s": 1e-8, "seq_s": 0.0, "error": 0.03, "num_steps": 60}


def write(folder: Path, **changes: object) -> str:
    about: dict[str, Any] = {"model": "embedded", "machine": "x", "num_blocks": 400, "kv_token_bytes": 6144}
    content = {**about, "num_layers": 6, "decode": DECODE, "prompt": PROMPT, "prompt_pair_s": 3e-9, **changes}
    path = folder / "profile.json"
    path.write_text(json.dumps(content))
    return str(path)


async def test_the_scheduler_knows_an_instances_steps_before_its_first(tmp_path: Path) -> None:
    config = load(
        {"model": {"path": "embedded"}, "prefill_instances": 0}, {}, {"engine.profile": write(tmp_path)}
    )
    async with LocalCluster.running(config) as cluster:
        while not (steps := (await cluster.frontend.status()).instances[0].steps).decode.num_steps:
            pass
    assert steps.decode.step_s(8, 1000, 8) == pytest.approx(0.004 + 8 * 3e-4 + 1e-4)
    assert (steps.prompt.token_s, steps.prompt.pair_s) == (pytest.approx(2e-4), pytest.approx(3e-9))


async def test_another_models_profile_is_refused_at_the_start(tmp_path: Path) -> None:
    path = write(tmp_path, model="large", num_layers=32)
    config = load({"model": {"path": "embedded"}}, {}, {"engine.profile": path})
    with pytest.raises(ConfigError, match=r"measured on large, with 32 layers .* this model has 6"):
        async with LocalCluster.running(config):
            pass


def test_what_cannot_hold_is_refused(tmp_path: Path) -> None:
    assert first_steps("", LAYOUT, 8).decode.num_steps == 0
    assert first_steps("", LAYOUT, 8, expert_share=0.25).decode.unread_decay == pytest.approx(-log(0.75))
    with pytest.raises(ConfigError, match="one rank, not on 2"):
        first_steps(write(tmp_path), LAYOUT, 2)
    with pytest.raises(ConfigError, match="no profile"):
        first_steps(write(tmp_path, decode={**DECODE, "seq_s": -1.0}), LAYOUT, 1)
    with pytest.raises(ConfigError, match="no profile"):
        first_steps(str(tmp_path / "absent.json"), LAYOUT, 1)
