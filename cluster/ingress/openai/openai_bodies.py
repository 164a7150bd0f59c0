"""The bodies that clients get, whole and in chunks: what OpenAI's routes share, and those of /v1/completions.

A chunk's JSON is put together around a prepared frame: only its text goes through the JSON encoder, once per token."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.ingress.delivery.generator import ChatTokenizer
from cluster.ingress.generation.answer_identity import AnswerIdentity
from cluster.ingress.generation.body_shape import Json
from cluster.ingress.generation.choices import ChoiceStream, TextPiece, num_prompt_tokens
from cluster.ingress.generation.token_texts import TokenTexts
from core.types import PromptScore, TokenOut


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What a client asked to have beside the text."""

    logprobs: bool = False
    usage: bool = False
    usage_everywhere: bool = False
    """Whether each chunk says what has been used up to it."""
    token_ids: bool = False
    prompt_logprobs: int | None = None


class OpenAIShape:
    id_prefix: str
    chunk_object: str
    object: str

    def __init__(
        self,
        identity: AnswerIdentity,
        model: str,
        tokenizer: ChatTokenizer,
        extras: Extras,
        choices: Sequence[ChoiceStream],
        num_prompts: int,
    ) -> None:
        self._head: Json = {
            "id": f"{self.id_prefix}-{identity.name}",
            "created": identity.created_at,
            "model": model,
            "system_fingerprint": None,
        }
        self._tokenizer, self._extras = tokenizer, extras
        self._texts = TokenTexts(tokenizer)
        self._choices, self._num_prompts = choices, num_prompts
        self._num_output = 0
        """The number of tokens that chunks were made of."""
        start = json.dumps({**self._head, "object": self.chunk_object})[:-1]
        self._frame = start + ', "choices": ['

    def frame(self, chunk: str) -> str:
        return f"data: {chunk}\n\n"

    def closing(self, usage: Mapping[str, Any]) -> list[str]:
        if not self._extras.usage:
            return ["[DONE]"]
        chunk = {**self._head, "object": self.chunk_object, "choices": [], "usage": usage}
        return [json.dumps(chunk), "[DONE]"]

    def error(self, status: int, body: Mapping[str, Any], request_id: str) -> str:
        return json.dumps(body)

    def body(self, pieces: Sequence[Sequence[TextPiece]], usage: Mapping[str, Any]) -> Json:
        choices = [self._choice(index, own) for index, own in enumerate(pieces)]
        return {**self._head, "object": self.object, "choices": choices, "usage": usage}

    def _choice(self, index: int, pieces: Sequence[TextPiece]) -> Json:
        raise AssertionError

    def _chunk(self, choice: str, more: str = "") -> str:
        """Return a chunk of `choice`, and `more` fields, each behind a comma."""
        if self._extras.usage_everywhere:
            num_prompt = num_prompt_tokens(self._choices, self._num_prompts)
            usage = {
                "prompt_tokens": num_prompt,
                "completion_tokens": self._num_output,
                "total_tokens": num_prompt + self._num_output,
            }
            return f'{self._frame}{choice}], "usage": {json.dumps(usage)}{more}}}'
        return self._frame + choice + ('], "usage": null' if self._extras.usage else "]") + more + "}"

    def _token_ids(self, piece: TextPiece) -> str:
        """Return the ids for a chunk's choice, behind a comma; empty where the client did not ask for them."""
        if not self._extras.token_ids or piece.token is None:
            return ""
        return f', "token_ids": [{piece.token.token}]'

    def _prompt_ids(self, index: int) -> list[int]:
        return list(self._choices[index].request.prompt)

    def _prompt_logprobs(self, index: int, scores: Sequence[PromptScore]) -> list[Json | None]:
        """Return them in vLLM's form: by token id, the prompt's own token first. Its first token has none."""
        following = self._choices[index].request.prompt[1:]
        return [None, *(self._scored(token, score) for token, score in zip(following, scores, strict=True))]

    def _scored(self, token: int, score: PromptScore) -> Json:
        assert self._extras.prompt_logprobs is not None
        likeliest = enumerate(score.top[: self._extras.prompt_logprobs], 1)
        found = {token: (score.rank, score.logprob)}
        for rank, (other, value) in likeliest:
            found.setdefault(other, (rank, value))
        return {
            str(number): {"logprob": value, "rank": rank, "decoded_token": self._texts.text(number)}
            for number, (rank, value) in found.items()
        }


def finish_word(piece: TextPiece) -> str:
    return "null" if piece.finish is None else f'"{piece.finish.value}"'


class CompletionShape(OpenAIShape):
    id_prefix = "cmpl"
    chunk_object = "text_completion"
    object = "text_completion"

    def __init__(self, *args: Any, echoes: Mapping[int, str], num_best: int) -> None:
        """`num_best` of the choices of each prompt are shown, those with the likeliest tokens."""
        super().__init__(*args)
        self._echoes, self._num_best = echoes, num_best
        self._offsets: dict[int, int] = {index: len(text) for index, text in echoes.items()}

    def opening(self, piece: TextPiece) -> list[str]:
        index, echo = piece.index, self._echoes.get(piece.index)
        ids = f', "prompt_token_ids": {self._prompt_ids(index)}' if self._extras.token_ids else ""
        if not echo and not ids:
            return []
        logprobs = (
            json.dumps(self._logprobs(index, [], piece.token)) if self._extras.logprobs and echo else "null"
        )
        choice = f'{{"index": {index}, "text": {json.dumps(echo or "")}, "logprobs": {logprobs}, "finish_reason": null{ids}}}'
        return [self._chunk(choice)]

    def chunks(self, piece: TextPiece) -> list[str]:
        self._num_output += not self._choices[piece.index].prompt_only
        extras = self._extras
        if not piece.text and piece.finish is None and not extras.logprobs and not extras.token_ids:
            return []
        logprobs = json.dumps(self._logprobs(piece.index, [piece])) if extras.logprobs else "null"
        choice = (
            f'{{"index": {piece.index}, "text": {json.dumps(piece.text)}, '
            f'"logprobs": {logprobs}, "finish_reason": {finish_word(piece)}{self._token_ids(piece)}}}'
        )
        return [self._chunk(choice)]

    def body(self, pieces: Sequence[Sequence[TextPiece]], usage: Mapping[str, Any]) -> Json:
        whole = super().body(pieces, usage)
        shown = [index for group in self._by_prompt() for index in self._best(group, pieces)]
        whole["choices"] = [
            {**whole["choices"][index], "index": number} for number, index in enumerate(shown)
        ]
        return whole

    def _by_prompt(self) -> list[range]:
        count = len(self._choices) // self._num_prompts
        return [range(first, first + count) for first in range(0, len(self._choices), count)]

    def _best(self, choices: range, pieces: Sequence[Sequence[TextPiece]]) -> Sequence[int]:
        if len(choices) == self._num_best:
            return choices

        def mean_logprob(index: int) -> float:
            values = [piece.token.logprob or 0.0 for piece in pieces[index] if piece.token is not None]
            return sum(values) / len(values)

        return sorted(choices, key=mean_logprob, reverse=True)[: self._num_best]

    def _choice(self, index: int, pieces: Sequence[TextPiece]) -> Json:
        text = self._echoes.get(index, "") + "".join(p.text for p in pieces)
        first, finish = pieces[0].token, pieces[-1].finish
        asks_for_prompt = first if index in self._echoes else None
        logprobs = self._logprobs(index, pieces, asks_for_prompt) if self._extras.logprobs else None
        choice: Json = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish and finish.value,
        }
        if self._extras.token_ids:
            sampled = [piece.token.token for piece in pieces if piece.token is not None]
            choice["prompt_token_ids"] = self._prompt_ids(index)
            choice["token_ids"] = [] if self._choices[index].prompt_only else sampled
        if self._extras.prompt_logprobs is not None and first is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(index, first.prompt_scores)
        return choice

    def _logprobs(self, index: int, pieces: Sequence[TextPiece], echoed: TokenOut | None = None) -> Json:
        """Return the log-probabilities of `pieces`. With `echoed`, the answer's first token, those of the prompt come before
        them."""
        out: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if echoed is not None:
            self._add_prompt(out, index, echoed.prompt_scores)
        offset = self._offsets.get(index, 0)
        for piece in pieces:
            if piece.token is None or self._choices[index].prompt_only:
                continue
            token = piece.token
            self._add(out, token.token, token.logprob, token.top, offset, leads=piece.leads)
            offset += len(piece.text)
        self._offsets[index] = offset
        return out

    def _add_prompt(self, out: Json, index: int, scores: Sequence[PromptScore]) -> None:
        choice, offset = self._choices[index], 0
        text = choice.text.anew()
        for token, score in zip(choice.request.prompt, [None, *scores], strict=False):
            top, leads = score.top if score else (), not text.has_begun
            self._add(out, token, score and score.logprob, top, offset, leads=leads)
            offset += len(text.push(token))
        out["top_logprobs"][0] = None

    def _add(
        self,
        out: Json,
        token: int,
        logprob: float | None,
        top: Sequence[tuple[int, float]],
        offset: int,
        *,
        leads: bool,
    ) -> None:
        """Add a token's entry. The token itself is always among the likeliest, so there may be one more than the client asked
        for. A further token of the same text is named by its id."""
        text = self._texts.name(token, leads=leads)
        likeliest: dict[str, float | None] = {}
        for other, value in top:
            name = text if other == token else self._texts.name(other, leads=leads)
            taken = other != token and (name == text or name in likeliest)
            likeliest[f"token_id:{other}" if taken else name] = value
        out["tokens"].append(text)
        out["token_logprobs"].append(logprob)
        out["top_logprobs"].append({**likeliest, text: logprob})
        out["text_offset"].append(offset)
