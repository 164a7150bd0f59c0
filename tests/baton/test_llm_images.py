"""Images through the whole of Baton in one process: the tokens are transformers' own, in chunks that cut an image, alone,
disaggregated, cached, on several ranks, and beside draft tokens."""

import json
from pathlib import Path
from typing import Any

import pytest

from baton import LLM, SamplingParams
from core.errors import RequestError
from models.vision import image_reader
from models.vision.tower import VisionTower
from tests.models.published_qwen import publish_qwen
from tests.models.seeing_checkpoints import (
    PARTS_ALONE,
    SEEING,
    encoded,
    greedy_over,
    make_image,
    make_seeing,
    said,
    shown,
    talks,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.turns(3),
    pytest.mark.usefixtures("forked"),
]
SMALL = {
    "engine__block_size": 4,
    "engine__num_blocks": 600,
    "engine__max_batch_tokens": 11,
    "engine__max_num_seqs": 3,
}
"""A step is shorter than an image, but for those of Gemma 3, which have 9 tokens."""
PAIR = {"prefill_instances": 1, "decode_instances": 1, "schedule__local_threshold_tokens": 0}
DISAGGREGATED = {**PAIR, "decode_instances": 2}
PARAMS = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.mark.parametrize("family", SEEING)
def test_tokens_equal_transformers_alone_and_disaggregated(family: str, tmp_path: Path) -> None:
    """The second time their prefixes are cached."""
    reference, processor = make_seeing(tmp_path, family)
    want = [greedy_over(reference, processor, messages, images, 8) for messages, images in talks()]
    assert want[0] != want[2], "another image changes what is said"
    for roles in ({}, DISAGGREGATED):
        with LLM(str(tmp_path), **SMALL, **roles) as llm:
            for _ in range(2):
                found = [llm.chat(messages, PARAMS).token_ids for messages, _ in talks()]
                assert found == want, roles


MESHES = {
    "tp to pp": {**PAIR, "prefill__tp": 2, "decode__pp": 2},
    "pp to tp": {**PAIR, "prefill__pp": 2, "decode__tp": 2},
}


@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("llava_next", "tp to pp"),
        ("qwen2_5_vl", "pp to tp"),
        ("qwen3_vl", "tp to pp"),
        ("qwen3_vl", "pp to tp"),
        ("qwen3_vl_moe", "tp to pp"),
        ("gemma3", "pp to tp"),
    ],
)
def test_tokens_are_the_same_on_several_ranks(family: str, mesh: str, tmp_path: Path) -> None:
    """Both ways with the model whose tower adds to the decoder's first layers."""
    reference, processor = make_seeing(tmp_path, family)
    want = [greedy_over(reference, processor, messages, images, 8) for messages, images in talks()]
    with LLM(str(tmp_path), **SMALL, **MESHES[mesh]) as llm:
        assert [llm.chat(messages, PARAMS).token_ids for messages, _ in talks()] == want


def test_tokens_of_gemmas_images_see_each_other_also_where_a_part_of_one_is_cached(tmp_path: Path) -> None:
    """Prompts go on with something else right behind an image. Where it begins in its block is different each time, so that some
    cached prefixes end within it."""
    reference, processor = make_seeing(tmp_path, "gemma3")
    asked: list[tuple[list[dict[str, Any]], list[Any]]] = []
    for seed in range(4):
        image, before = make_image(seed), said(("a", "ab 1", "ab 1 2", "ab 1 2 3")[seed])
        asked += [
            ([{"role": "user", "content": [before, shown(image), *behind]}], [image])
            for behind in ([], [said("And?")], [said(".")])
        ]
    want = [greedy_over(reference, processor, messages, images, 8) for messages, images in asked]
    causal = [
        greedy_over(reference, processor, messages, images, 8, token_type_ids=None)
        for messages, images in asked
    ]
    assert sum(one != other for one, other in zip(want, causal, strict=True)) > len(want) // 2
    for roles in ({}, DISAGGREGATED):
        with LLM(str(tmp_path), **SMALL, **roles) as llm:
            assert [llm.chat(messages, PARAMS).token_ids for messages, _ in asked] == want, roles


def test_bits_of_gemmas_images_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    reference, processor = make_seeing(tmp_path, "gemma3")
    want = [greedy_over(reference, processor, messages, images, 8) for messages, images in talks()]
    with LLM(str(tmp_path), **SMALL, engine__deterministic=True) as llm:
        assert [llm.chat(messages, PARAMS).token_ids for messages, _ in talks()] == want


def test_experts_of_a_model_that_reads_images_are_spread_over_ranks(tmp_path: Path) -> None:
    reference, processor = make_seeing(tmp_path, "qwen3_vl_moe")
    want = [greedy_over(reference, processor, messages, images, 8) for messages, images in talks()]
    with LLM(str(tmp_path), **SMALL, decode__ep=2) as llm:
        assert [llm.chat(messages, PARAMS).token_ids for messages, _ in talks()] == want


def test_a_checkpoint_of_qwen_as_it_was_published(tmp_path: Path) -> None:
    """With the names, and the flat configuration, of the time before transformers 5."""
    reference, processor = make_seeing(tmp_path, "qwen2_vl")
    publish_qwen(tmp_path)
    want = [greedy_over(reference, processor, messages, images, 8) for messages, images in talks()]
    with LLM(str(tmp_path), **SMALL) as llm:
        assert [llm.chat(messages, PARAMS).token_ids for messages, _ in talks()] == want


@pytest.mark.parametrize("roles", [{}, DISAGGREGATED], ids=["alone", "disaggregated"])
def test_an_image_that_an_instance_cannot_see_ends_its_request_alone(
    roles: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of what it has computed without it is cached."""
    reference, processor = make_seeing(tmp_path, "llava")
    messages, images = talks()[0]
    want = [greedy_over(reference, processor, *talk, 8) for talk in talks()[:3]]
    rows, bad = VisionTower.rows, {encoded(images[0])}

    def see(tower: VisionTower, data: bytes) -> Any:
        if data in bad:
            raise RuntimeError("this codec is missing here")
        return rows(tower, data)

    monkeypatch.setattr(VisionTower, "rows", see)
    with LLM(str(tmp_path), **SMALL, **roles) as llm:
        for _ in range(2):
            with pytest.raises(RequestError, match="cannot be read by the instance.*codec is missing"):
                llm.chat(messages, PARAMS)
            assert llm.chat(talks()[2][0], PARAMS).token_ids == want[2]
        bad.clear()
        assert [llm.chat(talk, PARAMS).token_ids for talk, _ in talks()[:3]] == want


@pytest.mark.parametrize("keys", [{"decode__tp": 2}, {"decode__pp": 2}], ids=["tp", "pp"])
def test_ranks_agree_that_they_cannot_see_an_image(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' projector of Mistral 3 fails with a single row, which ingresses refuse."""
    reference, processor = make_seeing(tmp_path, "mistral3")
    messages, images = talks()[0]
    want = greedy_over(reference, processor, messages, images, 8)
    monkeypatch.setattr(image_reader, "FEWEST_ROWS", 1)
    with LLM(str(tmp_path), **SMALL, **keys) as llm:
        for _ in range(2):
            with pytest.raises(RequestError, match="cannot be read by the instance"):
                llm.chat([{"role": "user", "content": [shown(make_image(1, 8, 8))]}], PARAMS)
            assert llm.chat(messages, PARAMS).token_ids == want


def test_draft_tokens_from_a_prompt_with_images_change_nothing(tmp_path: Path) -> None:
    reference, processor = make_seeing(tmp_path, "llava")
    image = make_image(1)
    messages = [
        {
            "role": "user",
            "content": [said("again and again and again"), shown(image), said("and again and again")],
        }
    ]
    want = greedy_over(reference, processor, messages, [image], 48)
    params = SamplingParams(temperature=0.0, max_tokens=48)
    with LLM(str(tmp_path), **SMALL, engine__speculate="ngram") as llm:
        assert llm.chat(messages, params).token_ids == want


def test_penalties_see_the_vocabularys_token_for_images(tmp_path: Path) -> None:
    reference, processor = make_seeing(tmp_path, "llava")
    messages, images = talks()[0]
    want = greedy_over(reference, processor, messages, images, 12, repetition_penalty=1.4)
    params = SamplingParams(temperature=0.0, max_tokens=12, repetition_penalty=1.4, num_prompt_logprobs=0)
    with LLM(str(tmp_path), **SMALL) as llm:
        assert llm.chat(messages, params).token_ids == want


def test_a_template_of_parts_alone_and_one_in_a_file_of_its_own(tmp_path: Path) -> None:
    """Older checkpoints have the template of their processor in chat_template.json."""
    reference, processor = make_seeing(tmp_path, "llava", PARTS_ALONE)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": processor.chat_template}))
    messages, images = talks()[0]
    with LLM(str(tmp_path), **SMALL) as llm:
        assert llm.chat(messages, PARAMS).token_ids == greedy_over(reference, processor, messages, images, 8)
        cut = shown(make_image(1))["image_url"]["url"][:-200]
        with pytest.raises(RequestError, match="damaged"):
            llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": cut}}]}])
