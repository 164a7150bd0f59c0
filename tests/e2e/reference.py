"""Somebody else's truth: greedy continuations by transformers, in float32."""

from collections.abc import Sequence
from functools import cache
from itertools import takewhile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.files.hub import resolve


@cache
def _model():
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(
        resolve("embedded"), dtype=torch.float32, attn_implementation="eager"
    ).eval()


@cache
def tokenizer():
    return AutoTokenizer.from_pretrained(resolve("embedded"))


def last_states(prompt: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """(the last token's hidden state, the log-probabilities behind each token)"""
    with torch.inference_mode():
        out = _model()(torch.tensor([prompt]), output_hidden_states=True)
    return out.hidden_states[-1][0, -1], torch.log_softmax(out.logits[0].float(), -1)


@cache
def greedy(prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """Up to `max_tokens` ids; ends before the end-of-sequence token."""
    return greedy_all((prompt,), max_tokens)[0]


@torch.inference_mode()
def greedy_all(prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[tuple[int, ...]]:
    """What `greedy` gives for each, computed as one batch: most of what so small a model takes for a token is overhead."""
    model, longest = _model(), max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    rows = model.generate(
        ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
    )[:, longest:].tolist()
    eos = model.generation_config.eos_token_id
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    return [tuple(takewhile(lambda token: token not in ends, row)) for row in rows]


def beams(prompt: tuple[int, ...], max_tokens: int, width: int) -> list[str]:
    """The texts of a beam search, best first."""
    with torch.inference_mode():
        found = _model().generate(
            torch.tensor([prompt]),
            max_new_tokens=max_tokens,
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            pad_token_id=0,
            attention_mask=torch.ones(1, len(prompt)),
        )
    return tokenizer().batch_decode(found[:, len(prompt) :], skip_special_tokens=True)


def greedy_text(prompt: tuple[int, ...], max_tokens: int) -> str:
    return tokenizer().decode(greedy(prompt, max_tokens), skip_special_tokens=True)


def greedy_texts(prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[str]:
    """What `greedy_text` gives for each, computed as one batch."""
    outputs = greedy_all(prompts, max_tokens)
    return [tokenizer().decode(tokens, skip_special_tokens=True) for tokens in outputs]


def corpus_prompts(count: int, min_tokens: int = 5, max_tokens: int = 300) -> list[tuple[int, ...]]:
    """Prompts of mixed lengths cut from the standard library; every third shares its predecessor's first half."""
    import inspect
    import json
    import textwrap

    ids = tokenizer().encode(inspect.getsource(json) + inspect.getsource(textwrap))
    prompts: list[tuple[int, ...]] = []
    for i in range(count):
        length = min_tokens + (i * 7919) % (max_tokens - min_tokens)
        start = (i * 104729) % (len(ids) - max_tokens)
        prompt = tuple(ids[start : start + length])
        if i % 3 == 2:
            half = prompts[-1][: max(2, len(prompts[-1]) // 2)]
            prompt = half + prompt[: max(1, length - len(half))]
        prompts.append(prompt)
    return prompts
