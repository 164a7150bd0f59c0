"""What the API needs of the cluster behind it, and of the tokenizer."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from cluster.ingress.delivery.beam_search import BeamParams
from cluster.ingress.delivery.kept_streams import KeptStream
from cluster.ingress.delivery.search_steps import Found
from cluster.ingress.delivery.shared_prompt import SharedPrompt
from core.config.adapter_config import ServedAdapter
from core.ports import TokenCodec
from core.reports import DroppedBlocks, Status
from core.sleep_messages import SleepLevel
from core.types import Request, TokenOut


class LoadsAdapters(Protocol):
    """`cluster.ingress.delivery.live_adapters.LiveAdapters` says what each method does."""

    @property
    def served(self) -> dict[str, ServedAdapter]: ...
    @property
    def in_use(self) -> tuple[str, ...]: ...
    async def load(self, key: str, folder: str, *, in_place: bool) -> None: ...
    async def unload(self, name: str) -> None: ...


class SleepsAndWakes(Protocol):
    """`cluster.ingress.delivery.model_sleep.ModelSleep` says what each method does."""

    async def sleep(self, level: SleepLevel, *, pauses: bool, timeout_s: float, drops: bool) -> None: ...
    async def wake(self) -> None: ...
    async def is_sleeping(self) -> bool: ...
    def keep_awake(self, seconds: float) -> None: ...


class FindsStreams(Protocol):
    def noted(self, request: Request, num_tokens: int, kept_at: str) -> None:
        """Tell the instance that keeps a request's tokens that the ledger of usage has the first `num_tokens`. The request has
        ended. `kept_at`: the instance that kept them before this frontend asked."""
        ...

    async def find_stream(self, stream: str, owner: str) -> KeptStream | None:
        """Return what is kept of an owner's stream; None where that is nothing. Raises ReplicaLost."""
        ...


class Generator(FindsStreams, Protocol):
    @property
    def address(self) -> str: ...
    @property
    def adapters(self) -> LoadsAdapters:
        """The adapters that are loaded while it runs."""
        ...

    @property
    def model_sleep(self) -> SleepsAndWakes: ...
    def new_request_id(self) -> str: ...
    def generate(
        self, request: Request, shared: SharedPrompt | None = None
    ) -> AsyncGenerator[TokenOut, None]:
        """Generate tokens in order, each once. Closing the iterator cancels the request. `shared`: one for all of a prompt's
        sequences. Raises Overloaded, RequestError, ReplicaLost."""
        ...

    async def search(self, request: Request, params: BeamParams, count: int) -> Found:
        """The `count` best answers that a beam search finds. Raises what `generate` does."""
        ...

    async def ready(self) -> tuple[bool, str]: ...
    async def status(self) -> Status: ...
    async def drop_caches(self) -> dict[str, DroppedBlocks]:
        """Have every instance give up its prefix cache, and return what each has dropped, by address. Raises ReplicaLost."""
        ...

    async def hint_session(self, tenant: str, session: str, *, release: bool) -> list[str]:
        """Have every instance release a tenant's session, or read its KV back. Returns the addresses of those that know it.
        Raises ReplicaLost."""
        ...


class ChatTokenizer(TokenCodec, Protocol):
    eos_token_id: int | None
    vocab_size: int
    template: str
    """The chat template's source; empty where there is none."""
    template_names: Sequence[str]
    """The names of the templates, where the checkpoint has several."""
    added_tokens: Mapping[str, int]
    """Tokens that stand for no text of their own, by their name."""
    special_tokens: Mapping[str, int]
    """The tokens that `skip_special_tokens` leaves out of the text, by their text."""

    def bytes_of_part(self, token: int) -> bytes | None:
        """Return the bytes of a token that is only part of a character; None where they are not known."""
        ...

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Return two texts in one prompt, and where the second begins for models that tell them apart, else 0."""
        ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_name: str = "",
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        keeps_null: bool = False,
        **template_arguments: Any,
    ) -> str:
        """Return a conversation's text, by the template of this name or the usual one. `keeps_null`: it sees null
        fields. Raises RequestError."""
        ...
