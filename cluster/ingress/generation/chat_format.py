"""How the served model is spoken to and read: what its chat template wants, and the markup that it answers in."""

import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cluster.ingress.bodies.request_bodies import ChatRequest, Message
from cluster.ingress.bodies.structured import answer_schema, grammar_of
from cluster.ingress.bodies.tool_bodies import (
    AllowedChatTools,
    NamedTool,
    Tool,
    ToolChoice,
)
from cluster.ingress.delivery.generator import ChatTokenizer
from cluster.ingress.generation.request_params import ApiSettings, chat_prompt
from cluster.ingress.images.image_intake import Seen, pictures_of
from cluster.ingress.parsers.call_formats import markup_of
from cluster.ingress.parsers.call_grammars import CallableTool, call_grammar
from cluster.ingress.parsers.harmony_grammar import harmony_grammar
from cluster.ingress.parsers.model_formats import THINK_MARKS, ModelFormats, make_parser
from cluster.ingress.parsers.output_events import OutputParser
from cluster.ingress.parsers.stop_strings import StopStrings
from cluster.ingress.templates.chat_template import ChatTemplate
from cluster.ingress.templates.reasoning_effort import ReasoningEfforts, TakenEffort
from core.errors import RequestError
from core.prompt_pictures import Picture
from core.types import Grammar, ThinkingBudget

_TAIL_TOKENS = 16
"""The number of tokens at the prompt's end that tell whether it ends within the reasoning."""
_LETTERS = string.ascii_letters + string.digits


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
    pictures: tuple[Picture, ...] = ()
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
        self._model_name, self._pictures = settings.model_name, settings.pictures
        self._vocab_size = settings.vocab_size
        self._template = ChatTemplate(
            tokenizer,
            settings.tool_call_parser,
            settings.reasoning_parser,
            sees=settings.pictures is not None,
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

    def new_call_id(self) -> str:
        short = self._template.short_ids
        letters = "".join(secrets.choice(_LETTERS) for _ in range(9 if short else 24))
        return letters if short else f"call_{letters}"

    def prepare(self, body: ChatRequest) -> PreparedChat:
        """Prepare a conversation. Raises RequestError."""
        body = _narrowed(body)
        tools = self._callable_tools(body)
        seen = self._seen(body, tools, is_counted=False)
        if seen.pictures and body.truncate_prompt_tokens is not None:
            raise RequestError(
                "truncate_prompt_tokens does not go with pictures: it could cut one",
                field="truncate_prompt_tokens",
                code="unsupported_parameter",
            )
        prompt = seen.prompt
        opened = self._prompt_ends_with(prompt, 0)
        grammar = self._grammar(body, tools, prompt, opened=opened)
        one_call = body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedTool)
        return PreparedChat(
            prompt=prompt,
            formats=self.formats,
            opened=opened,
            schemas={tool.function.name: tool.function.parameters or {} for tool in tools} if tools else None,
            max_calls=1 if tools and one_call else None,
            hidden_tokens=self._hidden[bool(tools)] if body.skip_special_tokens else None,
            thinking=self._budget(body.thinking_token_budget, opened=opened, cut=grammar is not None),
            grammar=grammar,
            pictures=seen.pictures,
            effort=self._effort(body),
        )

    def prompt_of(self, body: ChatRequest) -> tuple[int, ...]:
        """Return a conversation's tokens, also where they are more than the context has room for. Raises RequestError."""
        body = _narrowed(body)
        return self._seen(body, self._callable_tools(body), is_counted=True).prompt

    def _seen(self, body: ChatRequest, tools: Sequence[Tool], *, is_counted: bool) -> Seen:
        """Return the prompt and its pictures. Raises RequestError."""
        self._check_messages(body)
        rendered = [tool.model_dump(exclude_unset=True) for tool in tools] or None
        arguments = {**self._effort(body).arguments, **(body.chat_template_kwargs or {})}
        shown = partial(self._shown, body.messages)
        prompt = chat_prompt(
            body,
            rendered,
            arguments,
            self._template,
            self._tokenizer,
            self._max_context_tokens,
            shown=shown,
            is_counted=is_counted,
        )
        if self._pictures is None or not pictures_of(body.messages):
            return Seen(prompt, ())
        return self._pictures.take_in(body.messages, prompt)

    def _check_messages(self, body: ChatRequest) -> None:
        self._check_pictures(body.messages)
        if body.continue_final_message:
            self._check_final_message(body)

    def _shown(self, messages: Sequence[Message], text: str) -> str:
        """Return the messages' text as it is tokenized."""
        has_pictures = self._pictures is not None and pictures_of(messages)
        return self._pictures.in_text(text) if self._pictures is not None and has_pictures else text

    def _check_pictures(self, messages: Sequence[Message]) -> None:
        """Raise RequestError where there are any and the model reads text alone. Its chat template would fail on them."""
        if self._pictures is None and (found := pictures_of(messages)):
            raise RequestError(
                f"{found[0][0]}: the model {self._model_name!r} reads no pictures here",
                field="messages",
                code="unsupported_parameter",
            )

    def _check_final_message(self, body: ChatRequest) -> None:
        """Raise RequestError where the last message cannot be gone on with."""
        last, field = body.messages[-1], "continue_final_message"
        if last.role != "assistant" or last.tool_calls or not (last.text or "").strip():
            raise RequestError(
                f"{field}: the last message must be the assistant's, with text and without calls", field=field
            )
        if body.add_generation_prompt and "add_generation_prompt" in body.model_fields_set:
            raise RequestError(f"{field} does not go with add_generation_prompt=true", field=field)
        if self.formats.is_harmony:
            raise RequestError(
                f"{field}: an answer on gpt-oss's channels cannot be gone on with",
                field=field,
                code="unsupported_parameter",
            )

    def _callable_tools(self, body: ChatRequest) -> list[Tool]:
        """Return the tools to show, or None where `tool_choice` forbids calls: a model that is not shown a tool does not call
        it."""
        tools, choice = body.tools or [], body.tool_choice
        names = [tool.function.name for tool in tools]
        if doubled := next((name for name in names if names.count(name) > 1), None):
            raise RequestError(f"two tools are called {doubled!r}", field="tools")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise RequestError(
                f"tool_choice names {choice.function.name!r}, which is no tool", field="tool_choice"
            )
        if choice == "required" and not tools:
            raise RequestError("tool_choice is 'required', but there are no tools", field="tool_choice")
        if not tools or choice == "none":
            return []
        if self.formats.tools == "none":
            raise RequestError(
                f"this model's chat template {self._template.problem}; the server's operator can set "
                "model.tool_call_parser (--tool-call-parser)",
                field="tools",
                code="unsupported_parameter",
            )
        return tools

    def _grammar(
        self, body: ChatRequest, tools: Sequence[Tool], prompt: tuple[int, ...], *, opened: bool
    ) -> Grammar | None:
        """Return the grammar that `response_format`, `structured_outputs`, a forced call or a strict tool ask for. The reasoning
        before it is free. None means that the whole answer is."""
        must_call = body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)
        if self.formats.is_harmony:
            return self._channels_grammar(body, tools, must_call=must_call)
        if tools and (must_call or any(tool.function.strict for tool in tools) or body.is_structured):
            text = self._call_grammar(body, tools, must_call=must_call)
        else:
            text = grammar_of(body.response_format, body.structured_outputs)
        if not text:
            return None
        begin, end = (self._known_ids(mark) for mark in THINK_MARKS.get(self.formats.reasoning, ("", "")))
        if opened:
            if len(end) != 1:
                raise RequestError(
                    "this model has no token that ends its reasoning, so what follows cannot be constrained",
                    field="response_format",
                    code="unsupported_parameter",
                )
            return Grammar(text=text, think_end=end[0])
        if len(begin) == len(end) == 1 and not self._prompt_ends_with(prompt, 1):
            return Grammar(text=text, think_begin=begin[0], think_end=end[0])
        return Grammar(text=text)

    def _channels_grammar(
        self, body: ChatRequest, tools: Sequence[Tool], *, must_call: bool
    ) -> Grammar | None:
        """The same over gpt-oss's channels, of the whole turn: what is said on `analysis` is free within it."""
        if tools and body.structured_outputs is not None:
            raise _exclusive()
        answer = grammar_of(body.response_format, body.structured_outputs)
        if not answer and not must_call and not any(tool.function.strict for tool in tools):
            return None
        special, callables = self._tokenizer.special_tokens, _callables(tools, body.tool_choice)
        try:
            text = harmony_grammar(special, callables, must_call=must_call, answer=answer)
        except ValueError as error:
            field = "tool_choice" if must_call else "response_format"
            raise RequestError(
                f"gpt-oss's channels cannot be constrained with this model: {error}",
                field=field,
                code="unsupported_parameter",
            ) from None
        return Grammar(text=text)

    def _call_grammar(self, body: ChatRequest, tools: Sequence[Tool], *, must_call: bool) -> str:
        callables = _callables(tools, body.tool_choice)
        names = [tool.name for tool in callables]
        template, special = self._tokenizer.template, self._tokenizer.special_tokens
        markup = markup_of(self.formats.tools, names, special, template)
        assert markup is not None, "harmony has a grammar of its own"
        if body.structured_outputs is not None:
            raise _exclusive()
        one_call = body.parallel_tool_calls is False or isinstance(body.tool_choice, NamedTool)
        answer = answer_schema(body.response_format)
        try:
            return call_grammar(
                markup,
                callables,
                must_call=must_call,
                one_call=one_call,
                answer=answer,
                reasons=self.formats.reasoning != "none",
            )
        except ValueError as error:
            raise RequestError(f"tools: {error}", field="tools") from None

    def _effort(self, body: ChatRequest) -> TakenEffort:
        return TakenEffort() if body.reasoning_effort is None else self._efforts.of(body.reasoning_effort)

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


def _callables(tools: Sequence[Tool], choice: ToolChoice | None) -> list[CallableTool]:
    """Return the tools that may be called: the named one, or all."""
    functions = [tool.function for tool in tools]
    if isinstance(choice, NamedTool):
        functions = [function for function in functions if function.name == choice.function.name]
    return [CallableTool(name=f.name, schema=f.parameters or {}, strict=bool(f.strict)) for f in functions]


def _narrowed(body: ChatRequest) -> ChatRequest:
    """Return `body` with the tools that its `tool_choice` allows, and the mode of that in its place. Raises RequestError."""
    if not isinstance(body.tool_choice, AllowedChatTools):
        return body
    subset = body.tool_choice.allowed_tools
    allowed = {tool.function.name for tool in subset.tools}
    tools = [tool for tool in body.tools or () if tool.function.name in allowed]
    if unknown := allowed - {tool.function.name for tool in tools}:
        raise RequestError(f"tool_choice allows {min(unknown)!r}, which is no tool", field="tool_choice")
    return body.model_copy(update={"tools": tools, "tool_choice": subset.mode})


def _exclusive() -> RequestError:
    return RequestError("structured_outputs and tools exclude each other", field="structured_outputs")
