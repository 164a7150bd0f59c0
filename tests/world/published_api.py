"""The API over a published tokenizer, and a generator that emits given ids."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from core.types import FinishReason, Request, TokenOut
from models.text.tokenizer import Tokenizer
from tests.cluster.ingress.api.fakes import NAME, FakeGenerator
from tests.cluster.ingress.api.harness import SETTINGS, Api

__all__ = ["NAME", "IdGenerator", "api_of"]


class IdGenerator(FakeGenerator):
    """Emits `ids`. Each is the likeliest, and `other` is the next."""

    def __init__(self, ids: Sequence[int], other: int) -> None:
        super().__init__()
        self.ids, self.other = tuple(ids), other

    async def generate(self, request: Request, shared: object = None):
        self.requests.append(request)
        most = request.sampling.max_tokens
        for index, token in enumerate(self.ids[:most]):
            last = index + 1 == min(most, len(self.ids))
            top = ((token, -0.5), (self.other, -1.5))[: max(0, request.sampling.num_logprobs)]
            yield TokenOut(
                request_id=request.id,
                attempt=0,
                index=index,
                token=token,
                logprob=-0.5,
                top=top,
                finish=FinishReason.LENGTH if last else None,
                prompt_scores=(),
                num_cached=0,
            )


def api_of(tokenizer: Tokenizer, ids: Sequence[int] = (), other: int = 5) -> Api:
    settings = replace(
        SETTINGS,
        max_context_tokens=1 << 16,
        vocab_size=max(tokenizer.vocabulary.values()) + 1,
        eos_token_ids=(tokenizer.eos_token_id or 0,),
    )
    inner: Any = tokenizer
    return Api(IdGenerator(ids, other), settings, tokenizer=inner)
