"""Groups of ranks with experts that move between them, over real Ray and real HTTP: answers stay transformers' own."""

import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from models.tokenizer import load_tokenizer
from parallel.balance import first_placement, imbalance
from tests.e2e.cluster_process import ServeProcess, serving
from tests.models.served import greedy, make_served_as, some_prompts
from tests.parallel.families import awkward

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
RANKS, SPARE, LENGTH = 4, 4, 24
SETTINGS = [
    "schedule.local_threshold_tokens=0",
    "engine.block_size=4",
    "engine.prefix_cache=false",
    "decode.dp=2",
    "decode.ep=2",
    f"decode.ep_redundant_experts={SPARE}",
    "decode.ep_balance_interval_s=2",
    "decode.ep_move_bytes=1",
]


def skewed(folder: Path) -> Any:
    """The reference of a model whose router always chooses two of its eight experts, and one of the others."""
    reference = make_served_as(folder, awkward("deepseek_v3"))
    with torch.no_grad():
        for name, buffer in reference.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer[-2:] = 4.0
    reference.save_pretrained(folder, max_shard_size="1GB")
    return reference


def of_decode(server: ServeProcess, name: str) -> list[float]:
    """The decode instance's values of a metric, of all layers."""
    text = httpx.get(f"{server.base_url}/metrics", timeout=30).text
    samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    return [one.value for one in samples if one.name == name and one.labels["role"] == "decode"]


def test_experts_move_to_where_their_ranks_are_loaded_evenly_and_no_answer_changes(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    reference, prompts, decode = skewed(folder), some_prompts(5, 6, 30), load_tokenizer(folder).decode
    want = [decode(list(greedy(reference, prompt, LENGTH))) for prompt in prompts]
    options = [part for setting in SETTINGS for part in ("--set", setting)]
    arguments = ["--model", str(folder), "--prefill", "1", "--decode", "1", *options]
    with (
        serving(*arguments, log=tmp_path / "log") as server,
        openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        server.wait_status("two instances", lambda status: len(status["instances"]) == 2)
        name = client.models.list().data[0].id
        deadline, is_even = time.monotonic() + 120, False
        while not is_even:
            assert time.monotonic() < deadline, of_decode(server, "baton_instance_expert_imbalance_ratio")
            answer = client.completions.create(model=name, prompt=prompts, max_tokens=LENGTH, temperature=0)
            assert [choice.text for choice in answer.choices] == want
            found = of_decode(server, "baton_instance_expert_imbalance_ratio")
            is_even = bool(found) and max(found) < 1.2
        assert sum(of_decode(server, "baton_instance_expert_moves_total")) > 0
        first = first_placement(8, RANKS, SPARE)
        counts = [layer["counts"] for layer in server.wait_idle(2)["experts"]]
        assert min(imbalance(first, count, RANKS) for count in counts) > 1.3, "there was nothing to move"
