"""Offline batches in Python."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from baton import LLM, SamplingParams
from core.errors import ConfigError, RequestError
from models.files.hub import resolve
from tests.e2e.reference import corpus_prompts, greedy, greedy_text
from tests.models.continuation import continuation
from tests.models.peft_adapters import make_adapter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def llm():
    with LLM("embedded") as llm:
        yield llm


def test_results_are_in_input_order_and_equal_transformers(llm: LLM) -> None:
    prompts = corpus_prompts(12)
    answers = llm.generate(
        [list(p) for p in prompts], SamplingParams(temperature=0.0, max_tokens=24), progress=False
    )
    assert [a.text for a in answers] == [greedy_text(p, 24) for p in prompts]
    assert answers[0].token_ids[:8] == greedy(prompts[0], 24)[:8]


def test_texts_stop_strings_and_chat(llm: LLM) -> None:
    greedy_params = SamplingParams(temperature=0.0, max_tokens=40)
    (whole,) = llm.generate("import os\n\n\nclass Path", greedy_params, progress=False)
    (cut,) = llm.generate("import os\n\n\nclass Path", greedy_params, stop=["\n"], progress=False)
    assert cut.text == whole.text.split("\n")[0]
    assert cut.finish_reason == "stop"
    assert llm.chat([{"role": "user", "content": "Return the sum of two numbers."}], greedy_params).text


def test_disaggregated_in_one_process_is_the_same(llm: LLM) -> None:
    prompts = [list(p) for p in corpus_prompts(6)]
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=24)
    want = [a.text for a in llm.generate(prompts, params, progress=False)]
    with LLM(
        "embedded", prefill_instances=1, decode_instances=2, schedule__local_threshold_tokens=0
    ) as other:
        assert [a.text for a in other.generate(prompts, params, progress=False)] == want


def test_instances_of_any_role_in_one_process_are_the_same(llm: LLM) -> None:
    prompts = [list(p) for p in corpus_prompts(12)]
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=48)
    want = [a.text for a in llm.generate(prompts, params, progress=False)]
    with LLM(
        "embedded",
        any_role=True,
        prefill_instances=0,
        decode_instances=3,
        schedule__local_threshold_tokens=0,
        engine__prefix_cache=False,
    ) as other:
        for _ in range(3):  # the first time they learn how long their steps take
            assert [a.text for a in other.generate(prompts, params, progress=False)] == want


def test_a_prompt_that_cannot_fit_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2048"):
        llm.generate([[5] * 3000], progress=False)


def test_an_adapter_is_asked_for_by_name(tmp_path: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(resolve("embedded")).float().eval()
    truth = make_adapter(tmp_path, reference, 0)
    prompts = [list(prompt) for prompt in corpus_prompts(3)]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    with LLM("embedded", adapters={"one": str(tmp_path)}) as adapted:
        for adapter, model in (("one", truth), ("", reference)):
            answers = adapted.generate(prompts, params, adapter=adapter, ignore_eos=True, progress=False)
            for prompt, answer in zip(prompts, answers, strict=True):
                assert list(answer.token_ids) == continuation(model, prompt, answer.token_ids, 12)
        with pytest.raises(RequestError, match="no adapter 'two'; this model has 'one'"):
            adapted.generate(prompts, params, adapter="two", progress=False)


def test_an_adapter_comes_and_goes(tmp_path: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(resolve("embedded")).float().eval()
    truth = make_adapter(tmp_path / "one", reference, 0)
    prompt, params = list(corpus_prompts(1)[0]), SamplingParams(temperature=0.0, max_tokens=12)
    with LLM("embedded", adapters__folders=[str(tmp_path)]) as adapted:
        adapted.load_adapter("mine", str(tmp_path / "one"))
        (answer,) = adapted.generate([prompt], params, adapter="mine", ignore_eos=True, progress=False)
        assert list(answer.token_ids) == continuation(truth, prompt, answer.token_ids, 12)
        adapted.unload_adapter("mine")
        with pytest.raises(RequestError, match="no adapter 'mine'; this model has none"):
            adapted.generate([prompt], params, adapter="mine", progress=False)
        with pytest.raises(ConfigError, match=r"is not in one of adapters\.folders"):
            adapted.load_adapter("mine", "/etc")


def test_what_is_loaded_is_there_after_a_restart_where_a_store_keeps_it(tmp_path: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(resolve("embedded")).float().eval()
    truth = make_adapter(tmp_path / "one", reference, 0)
    prompt, params = list(corpus_prompts(1)[0]), SamplingParams(temperature=0.0, max_tokens=12)

    def start() -> LLM:
        store = f"sqlite:///{tmp_path / 'store.db'}"
        return LLM("embedded", adapters__folders=[str(tmp_path)], serve__store=store)

    with start() as first:
        first.load_adapter("mine", str(tmp_path / "one"))
    with start() as second:
        (answer,) = second.generate([prompt], params, adapter="mine", ignore_eos=True, progress=False)
    assert list(answer.token_ids) == continuation(truth, prompt, answer.token_ids, 12)
