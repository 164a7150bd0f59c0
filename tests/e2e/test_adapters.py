"""`baton serve` on Ray with adapters: of its start, and loaded while it runs, whichever process is replaced meanwhile."""

from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from transformers import AutoModelForCausalLM

from models.files.hub import resolve
from tests.e2e.cluster_process import ServeProcess, serving
from tests.e2e.reference import corpus_prompts
from tests.models.continuation import continuation
from tests.models.peft_adapters import make_adapter
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.turns(6, number=5)]
MODEL, LENGTH = "baton-embedded", 12
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class Client:
    def __init__(self, server: ServeProcess, truths: dict[str, Any]) -> None:
        self._server, self._truths = server, truths
        self._prompts = corpus_prompts(2)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self._server.base_url + path, json=body, timeout=PATIENCE_S)

    def models(self) -> list[str]:
        answer = httpx.get(f"{self._server.base_url}/v1/models", timeout=PATIENCE_S)
        return [model["id"] for model in answer.json()["data"]]

    def check(self, *names: str) -> None:
        """Each answers as PEFT does, on whichever instance."""
        for name in names:
            for prompt in self._prompts:
                answer = self.post(
                    "/v1/completions",
                    model=name,
                    prompt=list(prompt),
                    max_tokens=LENGTH,
                    temperature=0,
                    ignore_eos=True,
                    return_token_ids=True,
                )
                assert answer.status_code == 200, answer.text
                said = answer.json()["choices"][0]["token_ids"]
                assert said == continuation(self._truths[name], prompt, said, LENGTH)


def test_what_was_loaded_outlives_every_process_that_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    folder.mkdir()
    reference = AutoModelForCausalLM.from_pretrained(resolve("embedded")).float().eval()
    truths = {MODEL: reference}
    truths |= {name: make_adapter(folder / name, reference, seed) for seed, name in enumerate(("one", "two"))}
    options = (
        *("--prefill", "1", "--decode", "1", "--adapter", f"one={folder / 'one'}"),
        *("--set", f'adapters.folders=["{folder}"]', "--set", "schedule.local_threshold_tokens=4"),
    )
    with serving(*options, log=tmp_path / "log") as server:
        client = Client(server, truths)
        server.wait_idle(2)
        client.check(MODEL, "one")
        refused = client.post(LOAD, lora_name="two", lora_path="/etc")
        assert refused.status_code == 400
        assert "adapters.folders" in refused.json()["error"]["message"]
        answer = client.post(LOAD, lora_name="two", lora_path=str(folder / "two"))
        assert answer.status_code == 200, answer.text
        assert client.models() == [MODEL, "one", "two"]
        client.check(MODEL, "one", "two")
        for pool in ("Ingress", "Scheduler", "DecodePool", "PrefillPool"):
            victims = server.replicas(pool)
            for victim in victims:  # the scheduler's spare, too
                victim.kill()
            psutil.wait_procs(victims, PATIENCE_S)
            server.wait_ready()
            server.wait_idle(2)
            assert client.models() == [MODEL, "one", "two"], pool
            client.check(MODEL, "one", "two")
        answer = client.post(UNLOAD, lora_name="two")
        assert answer.status_code == 200, answer.text
        assert client.models() == [MODEL, "one"]
        client.check("one")
        gone = client.post("/v1/completions", model="two", prompt="x")
        assert gone.status_code == 404
