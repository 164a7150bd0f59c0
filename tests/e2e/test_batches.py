"""A batch over real Ray: through a killed ingress, a killed decode instance and a restart of the cluster, each line is answered once."""

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from openai.types import Batch

from tests.e2e.cluster_process import ServeProcess, serving
from tests.e2e.reference import corpus_prompts, greedy_text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
MODEL, URL = "baton-embedded", "/v1/completions"
NUM_LINES, NUM_PROMPTS, LENGTH, STEP = 1000, 12, 20, 20


def client_of(server: ServeProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=30)


def wait(server: ServeProcess, batch_id: str, what: str, done: Callable[[Batch], bool]) -> Batch:
    """Ask often, since lines are answered meanwhile: the SDK's own retries are seconds apart, in which a batch may end."""
    deadline, batch = time.monotonic() + 200, None
    with client_of(server) as client:
        while time.monotonic() < deadline:
            with contextlib.suppress(openai.APIConnectionError, openai.InternalServerError):
                batch = client.batches.retrieve(batch_id)
                if done(batch):
                    return batch
            time.sleep(0.1)
    raise AssertionError(f"{what} took too long: {batch}\n{server.log.read_text()[-3000:]}")


def completed(batch: Batch) -> int:
    """How many lines are answered of a batch that has lines left, without which the next kill would show nothing."""
    assert batch.status in ("validating", "in_progress"), batch
    return batch.request_counts.completed if batch.request_counts else 0


def test_each_line_is_answered_once_whatever_ends(tmp_path: Path) -> None:
    prompts = corpus_prompts(NUM_PROMPTS, max_tokens=80)
    lines = [
        {
            "custom_id": f"line {number}",
            "method": "POST",
            "url": URL,
            "body": {
                "model": MODEL,
                "prompt": list(prompts[number % NUM_PROMPTS]),
                "max_tokens": LENGTH,
                "temperature": 0,
            },
        }
        for number in range(NUM_LINES)
    ]
    arguments = ("--prefill", "0", "--set", f"serve.batch_dir={tmp_path / 'batches'}")
    with serving(*arguments, "--decode", "2", log=tmp_path / "first.log") as server:
        with client_of(server) as client:
            text = "\n".join(map(json.dumps, lines)).encode()
            file = client.files.create(file=("lines.jsonl", text), purpose="batch")
            batch = client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
        wait(server, batch.id, "the first answers", lambda found: completed(found) > STEP)
        os.kill(server.replicas("Ingress")[0].pid, 9)
        before = wait(server, batch.id, "the ingress", lambda found: True)
        wait(server, batch.id, "after the ingress", lambda found: completed(found) > completed(before) + STEP)
        os.kill(server.replicas("DecodePool")[0].pid, 9)
        before = wait(server, batch.id, "the decode instance", lambda found: True)
        wait(
            server,
            batch.id,
            "after the decode instance",
            lambda found: completed(found) > completed(before) + STEP,
        )
    with serving(*arguments, "--decode", "1", log=tmp_path / "second.log") as server:
        found = wait(server, batch.id, "the batch", lambda found: found.status == "completed")
        assert found.request_counts is not None
        assert found.error_file_id is None
        assert found.output_file_id is not None
        with client_of(server) as client:
            answers = [
                json.loads(line) for line in client.files.content(found.output_file_id).text.splitlines()
            ]
    assert Counter(each["custom_id"] for each in answers) == Counter(line["custom_id"] for line in lines)
    want = [greedy_text(prompt, LENGTH) for prompt in prompts]
    for each in answers:
        number = int(each["custom_id"].split()[1])
        assert each["response"]["body"]["choices"][0]["text"] == want[number % NUM_PROMPTS]
