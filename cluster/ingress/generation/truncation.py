"""Prompts that are cut to what a request allows: vLLM's `truncate_prompt_tokens`."""

from collections.abc import Sequence

from cluster.ingress.requests.generation_request import GenerationRequest
from core.errors import RequestError
from core.ports import TokenCodec

_NAME = "truncate_prompt_tokens"


def most_tokens(wanted: int, longest: int) -> int:
    """Return how many tokens of a prompt are to be left. -1 asks for the `longest` prompt that there can be. Raises
    RequestError."""
    if wanted == 0:
        raise RequestError(f"{_NAME}: 0 leaves nothing; -1 leaves as much as the model takes", field=_NAME)
    if wanted > longest:
        raise RequestError(f"{_NAME}: {wanted} is more than the {longest} that there can be", field=_NAME)
    return longest if wanted == -1 else wanted


def shortened(
    prompt: tuple[int, ...], most: int, around: Sequence[int], *, keep_end: bool
) -> tuple[int, ...]:
    """Return the last `most` tokens of a prompt, or else the first. `around` are the tokens that the tokenizer puts before and
    behind every text, which stay where they are."""
    if len(prompt) <= most:
        return prompt
    pairs = zip(prompt, around, strict=False)
    num_head = next((at for at, (mine, other) in enumerate(pairs) if mine != other), len(around))
    tail = tuple(around[num_head:])
    if prompt[len(prompt) - len(tail) :] != tail:
        tail = ()
    room = most - num_head - len(tail)
    if room < 1:
        return prompt[-most:] if keep_end else prompt[:most]
    text = prompt[num_head : len(prompt) - len(tail)]
    return prompt[:num_head] + (text[-room:] if keep_end else text[:room]) + tail


def ends_of_prompts(
    request: GenerationRequest, prompts: list[tuple[int, ...]], max_context_tokens: int, tokenizer: TokenCodec
) -> list[tuple[int, ...]]:
    """Return the ends of the prompts, as far as the request wants them. Raises RequestError."""
    if request.truncate_prompt_tokens is None:
        return prompts
    longest = max(1, max_context_tokens - (request.max_tokens or 1))
    most = most_tokens(request.truncate_prompt_tokens, longest)
    around = tokenizer.encode("")
    return [shortened(prompt, most, around, keep_end=True) for prompt in prompts]
