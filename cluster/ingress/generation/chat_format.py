"""How the served model is spoken to and read: what its chat template wants, and the markup that it answers in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.ingress.delivery.generator import ChatTokenizer
from cluster.ingress.generation.prompt_length import check_counted, check_length
from cluster.ingress.generation.request_params import ApiSettings
from cluster.ingress.images.image_intake import Seen, images_of
from cluster.ingress.parsers.call_formats import markup_of
from cluster.ingress.parsers.call_grammars import CallableTool, call_grammar
from cluster.ingress.parsers.harmony_grammar import harmony_grammar
from cluster.ingress.parsers.model_formats import THINK_MARKS, ModelFormats, make_parser
from cluster.ingress.parsers.output_events import OutputParser
from cluster.ingress.parsers.stop_strings import StopStrings
from cluster.ingress.requests.conversation import (
    CallChoice,
    ChatConversation,
    ChatMessage,
    DeclaredTool,
    top_field,
)
from cluster.ingress.requests.generation_request import AnswerForm, GenerationRequest
from cluster.ingress.templates.chat_template import ChatTemplate
from cluster.ingress.templates.reasoning_effort import ReasoningEfforts, TakenEffort
from core.errors import RequestError
from core.prompt_images import PromptImage
from core.types import Grammar, ThinkingBudget

_TAIL_TOKENS = 16
"""The number of tokens at the prompt's end that tell whether it ends within the reasoning."""
_TEMPLATE_RESERVED = {
    "self",
    *("messages", "conversation", "tools", "documents", "chat_template"),
    *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
    *("template_name", "tokenize", "tokenizer_kwargs", "sanitize_control_tokens"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict"),
}
"""What a client may not set through chat_template_kwargs: above all the template, which is a program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat:
    """One conversation, ready to be generated from. Each of its choices gets a parser of its own."""

    prompt: tuple[int, ...]
    formats: ModelFormats
    opened: bool
    """Whether the prompt ends within the reasoning."""
    schemas: Mapping[str, Mapping[str, Any]] | None
    """The parameters of the tools that may be called, by name. None means that calls are text."""
    max_calls: int | None
    hidden_tokens: frozenset[int] | None
    """The special tokens to leave out of the text although others must stay in it. None means that the request decides on all."""

    thinking: ThinkingBudget | None
    grammar: Grammar | None
    images: tuple[PromptImage, ...] = ()
    effort: TakenEffort = field(default_factory=TakenEffort)

    def new_parser(self, stops: StopStrings | None = None) -> OutputParser:
        return make_parser(
            self.formats,
            schemas=self.schemas,
            opened=self.opened,
            max_calls=self.max_calls,
            stops=stops,
        )


class ChatFormat:
    def __init__(self, tokenizer: ChatTokenizer, settings: ApiSettings) -> None:
        self._tokenizer, self._max_context_tokens = tokenizer, settings.max_context_tokens
        self._model_name, self._images = settings.model_name, settings.images
        self._vocab_size = settings.vocab_size
        self._template = ChatTemplate(
            tokenizer,
            settings.tool_call_parser,
            settings.reasoning_parser,
            sees=settings.images is not None,
        )
        self.formats = self._template.formats
        self._hidden = {
            with_tools: self._hidden_tokens(with_tools=with_tools) for with_tools in (False, True)
        }
        self._efforts = ReasoningEfforts(tokenizer, reasons=self.formats.reasoning != "none")

    @property
    def bounds_reasoning(self) -> bool:
        """Whether the model's reasoning can have a budget: a single token ends it."""
        return self.formats.reasoning != "none" and len(self._ids(self.formats.budget_marks[1])) == 1

    def call_id(self, unique: str) -> str:
        """Return a call's id, as the model's template takes it, from letters and digits that are unique."""
        return unique[:9] if self._template.short_ids else f"call_{unique[:24]}"

    def prepare(self, conversation: ChatConversation, request: GenerationRequest) -> PreparedChat:
        """Prepare a conversation. Raises RequestError."""
        tools, choice = self._callable_tools(conversation), conversation.tool_choice
        seen = self._seen(conversation, tools, request)
        if seen.images and request.truncate_prompt_tokens is not None:
            raise RequestError(
                "truncate_prompt_tokens does not go with images: it could cut one",
                field="truncate_prompt_tokens",
                code="unsupported_parameter",
            )
        prompt = seen.prompt
        opened = self._prompt_ends_with(prompt, 0)
        grammar = self._grammar(request, tools, choice, prompt, opened=opened)
        return PreparedChat(
            prompt=prompt,
            formats=self.formats,
            opened=opened,
            schemas={tool.name: tool.parameters or {} for tool in tools} if tools else None,
            max_calls=1 if tools and choice.one_call else None,
            hidden_tokens=self._hidden[bool(tools)] if request.skip_special_tokens else None,
            thinking=self._budget(request.thinking_tokens, opened=opened, cut=grammar is not None),
            grammar=grammar,
            images=seen.images,
            effort=self._effort(conversation),
        )

    def prompt_of(self, conversation: ChatConversation) -> tuple[int, ...]:
        """Return a conversation's tokens, also where they are more than the context has room for. Raises RequestError."""
        return self._seen(conversation, self._callable_tools(conversation), None).prompt

    def _seen(
        self, conversation: ChatConversation, tools: Sequence[DeclaredTool], request: GenerationRequest | None
    ) -> Seen:
        """Return the prompt and its images. `request` is None where only the prompt's length is wanted, which may be more than
        the context's. Raises RequestError."""
        messages = conversation.messages
        self._check_images(messages)
        if conversation.goes_on_by:
            self._check_final_message(messages[-1], conversation.goes_on_by)
        text, field = self._text(conversation, tools), top_field(messages[-1].place)
        if request is None:
            check_counted(text, field, self._max_context_tokens)
        elif request.truncate_prompt_tokens is None:
            check_length(text, field, self._tokenizer, self._max_context_tokens)
        images = self._images if images_of(messages) else None
        shown = text if images is None else images.in_text(text)
        prompt = tuple(self._tokenizer.encode(shown, add_special_tokens=False))
        if not prompt:
            raise RequestError("the conversation renders to no tokens", field=field)
        return Seen(prompt, ()) if images is None else images.take_in(messages, prompt)

    def _text(self, conversation: ChatConversation, tools: Sequence[DeclaredTool]) -> str:
        """Return what the template makes of a conversation. Raises RequestError."""
        arguments = {**self._effort(conversation).arguments, **conversation.template_arguments}
        if reserved := _TEMPLATE_RESERVED.intersection(arguments):
            raise RequestError(
                f"chat_template_kwargs: {min(reserved)!r} cannot be set there", field="chat_template_kwargs"
            )
        return self._template.render(
            conversation.messages,
            [tool.shown for tool in tools] or None,
            arguments,
            adds_prompt=conversation.begins_answer,
            goes_on=bool(conversation.goes_on_by),
        )

    def _check_images(self, messages: Sequence[ChatMessage]) -> None:
        """Raise RequestError where there are any and the model reads text alone. Its chat template would fail on them."""
        if self._images is None and (found := images_of(messages)):
            raise RequestError(
                f"{found[0].place}: the model {self._model_name!r} reads no images here",
                field=top_field(found[0].place),
                code="unsupported_parameter",
            )

    def _check_final_message(self, last: ChatMessage, field: str) -> None:
        """Raise RequestError where the last message cannot be gone on with."""
        if last.role != "assistant" or last.calls or not last.text.strip():
            raise RequestError(
                f"{field}: the last message must be the assistant's, with text and without calls", field=field
            )
        if self.formats.is_harmony:
            raise RequestError(
                f"{field}: an answer on gpt-oss's channels cannot be gone on with",
                field=field,
                code="unsupported_parameter",
            )

    def _callable_tools(self, conversation: ChatConversation) -> Sequence[DeclaredTool]:
        """Return the tools to show: none where `tool_choice` forbids calls. A model that is not shown a tool does not call it."""
        tools, choice = conversation.tools, conversation.tool_choice
        names = [tool.name for tool in tools]
        if doubled := next((name for name in names if names.count(name) > 1), None):
            raise RequestError(f"two tools are called {doubled!r}", field="tools")
        if choice.name and choice.name not in names:
            raise RequestError(f"tool_choice names {choice.name!r}, which is no tool", field="tool_choice")
        if choice.mode == "required" and not tools:
            raise RequestError("tool_choice is 'required', but there are no tools", field="tool_choice")
        if not tools or choice.mode == "none":
            return ()
        if self.formats.tools == "none":
            raise RequestError(
                f"this model's chat template {self._template.problem}; the server's operator can set "
                "model.tool_call_parser (--tool-call-parser)",
                field="tools",
                code="unsupported_parameter",
            )
        return tools

    def _grammar(
        self,
        request: GenerationRequest,
        tools: Sequence[DeclaredTool],
        choice: CallChoice,
        prompt: tuple[int, ...],
        *,
        opened: bool,
    ) -> Grammar | None:
        """Return the grammar that the answer's form, a forced call or a strict tool ask for. The reasoning before it is free.
        None means that the whole answer is."""
        form = request.form
        if tools and form is not None and form.schema is None:
            raise RequestError(f"{form.field} and tools exclude each other", field=form.field)
        if self.formats.is_harmony:
            return self._channels_grammar(request, tools, choice)
        must_call = choice.mode == "required"
        if tools and (must_call or any(tool.strict for tool in tools) or form is not None):
            text = self._call_grammar(form, tools, choice)
        else:
            text = "" if form is None else form.grammar
        if not text:
            return None
        begin, end = (self._known_ids(mark) for mark in THINK_MARKS.get(self.formats.reasoning, ("", "")))
        if opened:
            if len(end) != 1:
                raise RequestError(
                    "this model has no token that ends its reasoning, so what follows cannot be constrained",
                    field=request.constrained_by,
                    code="unsupported_parameter",
                )
            return Grammar(text=text, think_end=end[0])
        if len(begin) == len(end) == 1 and not self._prompt_ends_with(prompt, 1):
            return Grammar(text=text, think_begin=begin[0], think_end=end[0])
        return Grammar(text=text)

    def _channels_grammar(
        self, request: GenerationRequest, tools: Sequence[DeclaredTool], choice: CallChoice
    ) -> Grammar | None:
        """The same over gpt-oss's channels, of the whole turn: what is said on `analysis` is free within it."""
        answer, must_call = "" if request.form is None else request.form.grammar, choice.mode == "required"
        if not answer and not must_call and not any(tool.strict for tool in tools):
            return None
        special, callables = self._tokenizer.special_tokens, _callables(tools, choice)
        try:
            text = harmony_grammar(special, callables, must_call=must_call, answer=answer)
        except ValueError as error:
            field = "tool_choice" if must_call else request.constrained_by
            raise RequestError(
                f"gpt-oss's channels cannot be constrained with this model: {error}",
                field=field,
                code="unsupported_parameter",
            ) from None
        return Grammar(text=text)

    def _call_grammar(
        self, form: AnswerForm | None, tools: Sequence[DeclaredTool], choice: CallChoice
    ) -> str:
        callables = _callables(tools, choice)
        names = [tool.name for tool in callables]
        template, special = self._tokenizer.template, self._tokenizer.special_tokens
        markup = markup_of(self.formats.tools, names, special, template)
        assert markup is not None, "harmony has a grammar of its own"
        try:
            return call_grammar(
                markup,
                callables,
                must_call=choice.mode == "required",
                one_call=choice.one_call,
                answer=None if form is None else form.schema,
                reasons=self.formats.reasoning != "none",
            )
        except ValueError as error:
            raise RequestError(f"tools: {error}", field="tools") from None

    def _effort(self, conversation: ChatConversation) -> TakenEffort:
        return TakenEffort() if conversation.effort is None else self._efforts.of(conversation.effort)

    def _budget(self, max_tokens: int | None, *, opened: bool, cut: bool) -> ThinkingBudget | None:
        """Return the budget of the reasoning. `cut` forces nothing behind the reasoning's end, where a grammar begins."""
        if max_tokens is None:
            return None
        begin, end, forced = (self._ids(mark) for mark in self.formats.budget_marks)
        if len(end) != 1:
            # The model may write an end of several tokens with other tokens. It would go unnoticed, and be forced a second time.
            raise RequestError(
                "this model has no token that ends its reasoning, so it cannot have a budget",
                field="thinking_token_budget",
                code="unsupported_parameter",
            )
        forced = forced[: forced.index(end[0]) + 1] if cut and end[0] in forced else forced
        bound = min(max_tokens, self._max_context_tokens)
        return ThinkingBudget(max_tokens=bound, begin=() if opened else begin, end=end, forced=forced)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False)) if text else ()

    def _known_ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a mark; none where the model does not have them, so that it never writes the mark."""
        ids = self._ids(text)
        return ids if max(ids, default=0) < self._vocab_size else ()

    def _prompt_ends_with(self, prompt: tuple[int, ...], which: int) -> bool:
        """Return whether the prompt ends with a mark of reasoning: `which` is 0 for the one that begins it, 1 for the one that
        ends it."""
        marks = THINK_MARKS.get(self.formats.reasoning)
        if marks is None:
            return False
        tail = self._tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False)
        return tail.rstrip().endswith(marks[which])

    def _hidden_tokens(self, *, with_tools: bool) -> frozenset[int] | None:
        """Return the special tokens that are no part of the markup; None where the markup has none of them."""
        special, marks = self._tokenizer.special_tokens, self.formats.marks(with_tools=with_tools)
        of_markup = {text for text in special if text and any(text in mark for mark in marks)}
        return frozenset(special[text] for text in special.keys() - of_markup) if of_markup else None


def _callables(tools: Sequence[DeclaredTool], choice: CallChoice) -> list[CallableTool]:
    """Return the tools that may be called: the named one, or all."""
    return [
        CallableTool(name=tool.name, schema=tool.parameters or {}, strict=bool(tool.strict))
        for tool in tools
        if choice.name in ("", tool.name)
    ]
