"""Published tokenizers with tokens that their models have no row for: nothing that clients write ends an instance."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from baton import LLM, SamplingParams
from cluster.ingress.api_factory import build_app
from cluster.ingress.model_card import read_model_card
from cluster.ingress.telemetry.observers import make_observers
from cluster.ingress.tenants.live_rules import LiveRules
from cluster.local import LocalCluster
from core.config.cluster_config import ClusterConfig, load
from core.errors import RequestError
from tests.world.artefacts import model_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.turns(2)]
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
CASES = {
    # artefact: (the token, whether a fine-tune has added it, the embedding's rows)
    "gemma3": ("<image_soft_token>", False, 262144),
    "llama2": ("[PAD]", True, 32000),
}


def checkpoint(name: str, folder: Path) -> str:
    """A tiny model with the tokenizer of `name`. Returns the token that it lacks."""
    token, is_added, num_rows = CASES[name]
    model_folder(name, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if is_added:
        tokenizer.add_special_tokens({"pad_token": token})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=num_rows,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        eos_token_id=[1, num_rows],
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    assert tokenizer.convert_tokens_to_ids(token) >= num_rows
    return token


def config_of(folder: Path) -> ClusterConfig:
    values: dict[str, Any] = {"model.path": str(folder), "model.name": "tiny", "engine.num_blocks": 100}
    return load(None, {}, {**values, "prefill_instances": 0})


@asynccontextmanager
async def served(config: ClusterConfig) -> AsyncIterator[httpx.AsyncClient]:
    card = read_model_card(config)
    observers = make_observers(card.name)
    async with LocalCluster.running(config, observers.observe) as cluster:
        app = build_app(cluster.frontend, config, card, LiveRules(config).access, observers)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://api", timeout=60
        ) as client:
            yield client
        assert all(instance.failure is None for instance in cluster.instances)


@pytest.mark.parametrize("name", CASES)
async def test_a_chat_with_a_token_that_the_model_lacks_is_refused_and_the_next_is_answered(
    name: str, tmp_path: Path
) -> None:
    token = checkpoint(name, tmp_path)
    good = {"model": "tiny", "max_tokens": 4, "temperature": 0}
    ids = AutoTokenizer.from_pretrained(tmp_path).encode(token, add_special_tokens=False)
    chat = [{"role": "user", "content": f"What is {token} for?"}]
    bad: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": chat}),
        ("/v1/chat/completions", {"messages": chat, "stream": True}),
        ("/v1/completions", {"prompt": token}),
        ("/v1/completions", {"prompt": ids}),
        ("/v1/completions", {"prompt": "x", "bad_words": [token]}),
        ("/v1/completions", {"prompt": "x", "logit_bias": {str(ids[0]): 1}}),
        ("/v1/messages", {"messages": chat}),
        ("/v1/responses", {"input": chat, "max_tokens": None, "max_output_tokens": 4}),
    ]
    async with served(config_of(tmp_path)) as client:
        for path, body in bad:
            whole = {key: value for key, value in {**good, **body}.items() if value is not None}
            refused = await client.post(path, json=whole)
            assert refused.status_code == 400, (path, refused.text)
            assert token in refused.json()["error"]["message"]
        answer = await client.post("/v1/completions", json={**good, "prompt": "x"})
        assert answer.status_code == 200, answer.text
        assert (await client.get("/ready")).status_code == 200


@pytest.mark.parametrize("name", CASES)
def test_llm_refuses_such_a_token_and_goes_on(name: str, tmp_path: Path) -> None:
    token = checkpoint(name, tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=4)
    with LLM(config=config_of(tmp_path), model=str(tmp_path)) as llm:
        for ask in (
            lambda: llm.generate(["x", token], params, progress=False),
            lambda: llm.chat([{"role": "user", "content": token}], params),
        ):
            with pytest.raises(RequestError, match="the model has no embedding of it"):
                ask()
            assert llm.generate("x", params, progress=False)[0].token_ids
