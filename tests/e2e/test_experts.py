"""A model with latent attention, and with experts that move between groups of ranks, over real Ray, real HTTP and TCP with checksums:
answers stay transformers' own."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from models.text.tokenizer import load_tokenizer
from parallel.balance import first_placement, imbalance
from tests.e2e.cluster_process import ServeProcess, serving
from tests.models.served import greedy, make_served_as, some_prompts
from tests.parallel.families import awkward
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420), pytest.mark.turns(6, number=4)]
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
    "transfer.transport=tcp",
    "transfer.checksum=true",
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


def metrics(server: ServeProcess) -> str:
    return httpx.get(f"{server.base_url}/metrics", timeout=PATIENCE_S).text


def of_decode(server: ServeProcess, name: str) -> list[float]:
    """The decode instance's values of a metric, of all layers."""
    families = text_string_to_metric_families(metrics(server))
    samples = [one for family in families for one in family.samples]
    return [one.value for one in samples if one.name == name and one.labels["role"] == "decode"]


def test_no_answer_changes_while_experts_move_and_prefill_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    reference, prompts, decode = skewed(folder), some_prompts(5, 12, 30), load_tokenizer(folder).decode
    want = [decode(list(greedy(reference, prompt, LENGTH))) for prompt in prompts]
    options = [part for setting in SETTINGS for part in ("--set", setting)]
    arguments = ["--model", str(folder), "--prefill", "1", "--decode", "1", *options]
    with (
        serving(*arguments, log=tmp_path / "log") as server,
        openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=120) as client,
        ThreadPoolExecutor(6) as threads,
    ):
        server.wait_status("two instances", lambda status: len(status["instances"]) == 2)
        name = client.models.list().data[0].id

        def ask(asked: list[list[int]]) -> list[str]:
            answer = client.completions.create(model=name, prompt=asked, max_tokens=LENGTH, temperature=0)
            return [choice.text for choice in answer.choices]

        deadline, is_even = time.monotonic() + 2 * PATIENCE_S, False
        while not is_even:
            assert time.monotonic() < deadline, of_decode(server, "baton_instance_expert_imbalance_ratio")
            assert ask(prompts[:6]) == want[:6]
            found = of_decode(server, "baton_instance_expert_imbalance_ratio")
            is_even = bool(found) and max(found) < 1.2
        assert sum(of_decode(server, "baton_instance_expert_moves_total")) > 0
        first = first_placement(8, RANKS, SPARE)
        counts = [layer["counts"] for layer in server.wait_idle(2)["experts"]]
        assert min(imbalance(first, count, RANKS) for count in counts) > 1.3, "there was nothing to move"
        assert 'baton_kv_transfers_total{transport="tcp"}' in metrics(server)
        running = [threads.submit(ask, [prompt]) for prompt in prompts[6:]]
        server.replicas("PrefillPool")[0].kill()
        assert [text for answer in running for text in answer.result()] == want[6:]
        server.wait_idle(2)
