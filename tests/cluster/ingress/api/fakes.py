"""A generator that answers with a given text, and a tokenizer of 256 bytes plus an end token."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from cluster.ingress.telemetry import request_context
from core.config.adapter_config import ServedAdapter, adapter_name
from core.errors import RequestError
from core.reports import DroppedBlocks, Status
from core.types import FinishReason, PromptScore, Request, TokenOut

END = 256
NAME = "fake"


class ByteTokenizer:
    """One token per byte, so that every character beyond ASCII is several tokens."""

    eos_token_id = END
    vocab_size = 257
    template = ""
    template_names: Sequence[str] = ()
    added_tokens: Mapping[str, int] = {}
    special_tokens: Mapping[str, int] = {"<end>": END}

    def __init__(self) -> None:
        self.encoded_on: list[threading.Thread] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.encoded_on.append(threading.current_thread())
        return list(text.encode())

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        ids = self.encode(first)
        return [*ids, *self.encode(second)], len(ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text = bytes(i for i in ids if i < 256).decode(errors="replace")
        return text if skip_special_tokens or END not in ids else text + "<end>"

    def bytes_of_part(self, token: int) -> bytes | None:
        return bytes([token])

    def render_chat(
        self, messages: Sequence[Any], tools: Any = None, add_generation_prompt: bool = True, **_: Any
    ) -> str:
        if any(m["content"] == "refuse me" for m in messages):
            raise RequestError("the chat template refuses these messages", field="messages")
        text = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        return text + ("assistant: " if add_generation_prompt else "")


class FastTokenizer:
    """A tokenizer of the tokenizers library as a core.ports.TokenCodec."""

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._inner.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        ids = self.encode(first)
        return [*ids, *self.encode(second)], len(ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)


def byte_level_tokenizer() -> FastTokenizer:
    """As of GPT-2, Llama 3 and Qwen: bytes and a few merges, one of which ends inside a character."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ((mapped, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("한")
    first, second, _ = mapped
    merges = [("a", "b"), ("\u0120", "a"), (first, second)]
    vocab = {piece: i for i, piece in enumerate([*letters, *("".join(pair) for pair in merges)])}
    inner = Tokenizer(BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return FastTokenizer(inner)


def byte_fallback_tokenizer() -> FastTokenizer:
    """As of Llama 2, Mistral and Gemma: words with a leading mark for the space, bytes for what is in no word."""
    words = ["\u2581", "a", "b", "\u2581a", "\u2581b", "\u2581ab", "ab", "\u754c"]
    merges = [("\u2581", "a"), ("\u2581", "b"), ("a", "b"), ("\u2581", "ab")]
    vocab = {piece: i for i, piece in enumerate(["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *words])}
    inner = Tokenizer(BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return FastTokenizer(inner)


def _scores(request: Request) -> tuple[PromptScore, ...]:
    """The n-th token of the prompt has the log-probability -n and the rank 2; a likelier one is 65."""
    if (wanted := request.sampling.num_prompt_logprobs) < 0:
        return ()
    top = ((65, -0.25), (66, -9.0))[:wanted]
    return tuple(PromptScore(-float(n), 2, top) for n in range(1, len(request.prompt)))


class FakeAdapters:
    """Have what is loaded at once."""

    def __init__(self) -> None:
        self.served: dict[str, ServedAdapter] = {}
        self.in_use: tuple[str, ...] = ()
        self.refusal: Exception | None = None
        self.loaded: list[tuple[str, str, bool]] = []

    async def load(self, key: str, folder: str, *, in_place: bool) -> None:
        self.loaded.append((key, folder, in_place))
        if self.refusal is not None:
            raise self.refusal
        self.served[adapter_name(key)] = ServedAdapter(key, folder)

    async def unload(self, name: str) -> None:
        if self.refusal is not None:
            raise self.refusal
        del self.served[name]


class FakeModelSleep:
    """Remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_asleep = False
        self.refusal: Exception | None = None

    async def sleep(self, level: int, *, pauses: bool, timeout_s: float, drops: bool) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.asked.append(f"sleep {level} {pauses=} {timeout_s=:g} {drops=}")
        self.is_asleep = True

    async def wake(self) -> None:
        self.asked.append("wake")
        self.is_asleep = False

    async def is_sleeping(self) -> bool:
        return self.is_asleep

    def keep_awake(self, seconds: float) -> None:
        self.asked.append(f"keep {seconds:g}")


class FakeGenerator:
    """Emits `text` byte by byte, then the end token; remembers what it was asked and what became of it."""

    address = "frontend"

    def __init__(self, text: str = "hello world", pause_s: float = 0.0) -> None:
        self.text, self.pause_s = text, pause_s
        self.adapters, self.model_sleep = FakeAdapters(), FakeModelSleep()
        self.fail_at: tuple[int, Exception] | None = None
        self.requests: list[Request] = []
        self.routes: list[str] = []
        """The route for which the metrics count each request."""
        self.hinted: list[tuple[str, str, bool]] = []
        """(tenant, session, whether it is released) of what was said of sessions without a request."""
        self.closed: list[str] = []
        self.finished: list[str] = []
        self.count = 0
        self.ready_answer = (True, "")
        self.stall_at: int | None = None
        self.num_cached = 0
        """How many of a prompt's tokens it says were cached."""
        self.go_on = asyncio.Event()
        """What it waits for before this token."""

    def new_request_id(self) -> str:
        self.count += 1
        return f"r{self.count}"

    async def ready(self) -> tuple[bool, str]:
        return self.ready_answer

    async def status(self) -> Status:
        return Status(nonce=0, why_not="", num_queued=0, instances=())

    async def drop_caches(self) -> dict[str, DroppedBlocks]:
        return {
            "one": DroppedBlocks(device=5, host=2, disk=1, in_use=3),
            "other": DroppedBlocks(device=7),
        }

    def noted(self, request: Request, num_tokens: int, kept_at: str) -> None: ...

    async def find_stream(self, stream: str, owner: str) -> None:
        return None

    async def hint_session(self, tenant: str, session: str, *, release: bool) -> list[str]:
        self.hinted.append((tenant, session, release))
        return ["one"]

    async def generate(self, request: Request, shared: object = None):
        self.requests.append(request)
        self.routes.append(request_context.route.get())
        ids = [*self.text.encode(), END]
        done = False
        try:
            for index, token in enumerate(ids):
                if self.fail_at and self.fail_at[0] == index:
                    raise self.fail_at[1]
                if self.stall_at == index:
                    await self.go_on.wait()
                if self.pause_s:
                    await asyncio.sleep(self.pause_s)
                stop = token in request.sampling.stop_token_ids
                last = index + 1 >= request.sampling.max_tokens
                finish = FinishReason.STOP if stop else FinishReason.LENGTH if last else None
                top = ((token, -0.5), (65, -1.5))[: max(0, request.sampling.num_logprobs)]
                logprob = -0.5 if request.sampling.num_logprobs >= 0 else None
                done = finish is not None
                yield TokenOut(
                    request_id=request.id,
                    attempt=0,
                    index=index,
                    token=token,
                    logprob=logprob,
                    top=top,
                    finish=finish,
                    prompt_scores=() if index else _scores(request),
                    num_cached=0 if index else self.num_cached,
                )
                if done:
                    return
        finally:
            (self.finished if done else self.closed).append(request.id)
