"""Turns the bodies of chats and completions into the one internal request."""

from collections.abc import Mapping
from dataclasses import replace

from cluster.ingress.bodies.cache_hints import hints_of
from cluster.ingress.bodies.request_fields import as_tuple, sampling_of
from cluster.ingress.bodies.structured import form_of
from cluster.ingress.bodies.tool_bodies import AllowedChatTools, NamedTool, ToolChoice
from cluster.ingress.generation.request_params import ApiSettings
from cluster.ingress.openai.request_bodies import ChatRequest, CompletionRequest
from cluster.ingress.requests.conversation import CallChoice, ChatConversation, only_named
from cluster.ingress.requests.generation_request import GenerationRequest
from core.errors import RequestError

_COMPLETION_DEFAULT_TOKENS = 16
_MAX_ID_DIGITS = 12


def conversation_of(body: ChatRequest) -> ChatConversation:
    """Return what a chat's prompt is made of. Raises RequestError."""
    goes_on = body.continue_final_message
    if goes_on and body.add_generation_prompt and "add_generation_prompt" in body.model_fields_set:
        raise RequestError(
            "continue_final_message does not go with add_generation_prompt=true",
            field="continue_final_message",
        )
    tools = tuple(tool.tool for tool in body.tools or ())
    if isinstance(body.tool_choice, AllowedChatTools):
        allowed = body.tool_choice.allowed_tools
        tools = only_named(tools, [tool.function.name for tool in allowed.tools])
    return ChatConversation(
        messages=[message.message(f"messages[{at}]") for at, message in enumerate(body.messages)],
        tools=tools,
        tool_choice=_choice(body.tool_choice, parallel=body.parallel_tool_calls is not False),
        effort=body.reasoning_effort,
        template_arguments=body.chat_template_kwargs or {},
        begins_answer=body.add_generation_prompt and not goes_on,
        goes_on_by="continue_final_message" if goes_on else "",
    )


def generation_of(body: ChatRequest | CompletionRequest) -> GenerationRequest:
    """Return how the answers are generated. Raises RequestError."""
    hints, retain = hints_of(body.hints, body.prompt_cache_key, body.prompt_cache_retention)
    request = GenerationRequest(
        terms=body.terms,
        prompt_field="prompt",
        max_tokens=body.max_tokens,
        min_tokens=body.min_tokens,
        sampling=sampling_of(body),
        seed=body.seed,
        logit_bias=_logit_bias(body.logit_bias or {}),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        bad_words=tuple(body.bad_words or ()),
        stops=as_tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos,
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        num_prompt_logprobs=-1 if body.prompt_logprobs is None else body.prompt_logprobs,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        stream=bool(body.stream),
        form=form_of(body.response_format, body.structured_outputs),
        hints=hints,
        retain=retain,
    )
    return _of_chat(body, request) if isinstance(body, ChatRequest) else _of_completion(body, request)


def _of_chat(body: ChatRequest, request: GenerationRequest) -> GenerationRequest:
    """Return the request with what chats have of their own. Of the two limits the smaller holds."""
    limits = [limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None]
    return replace(
        request,
        prompt_field="messages",
        max_tokens=min(limits, default=None),
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else -1,
        thinking_tokens=body.thinking_token_budget,
    )


def _of_completion(body: CompletionRequest, request: GenerationRequest) -> GenerationRequest:
    wanted = -1 if body.logprobs is None else body.logprobs
    is_best = (body.best_of or 1) > (body.n or 1)  # the best of several are those with the likeliest tokens
    return replace(
        request,
        default_tokens=_COMPLETION_DEFAULT_TOKENS,
        num_logprobs=max(wanted, 0 if is_best else -1),
        num_prompt_logprobs=max(wanted if body.echo else -1, request.num_prompt_logprobs),
    )


def check_count(body: ChatRequest | CompletionRequest, num_prompts: int, settings: ApiSettings) -> int:
    """Return how many choices of each prompt are to be generated. Raises RequestError."""
    n = body.n or 1
    best_of = body.best_of if isinstance(body, CompletionRequest) else None
    if best_of is not None:
        if best_of < n:
            raise RequestError(f"best_of ({best_of}) is less than n ({n})", field="best_of")
        if best_of > n and body.stream:
            raise RequestError(
                "best_of: the best of several answers are known at their ends; ask without stream",
                field="best_of",
            )
        n = best_of
    if n * num_prompts > settings.max_n:
        raise RequestError(
            f"{n} choices for {num_prompts} prompts exceed the limit of {settings.max_n}",
            field="n" if best_of is None else "best_of",
        )
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options goes with stream=true", field="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("prompt_logprobs: ask without stream", field="prompt_logprobs")
    if isinstance(body, ChatRequest) and body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs goes with logprobs=true", field="top_logprobs")
    return n


def _choice(choice: ToolChoice | None, *, parallel: bool) -> CallChoice:
    match choice:
        case NamedTool(function=function):
            return CallChoice("required", function.name, parallel)
        case AllowedChatTools(allowed_tools=allowed):
            return CallChoice(allowed.mode, "", parallel)
        case _:
            return CallChoice(choice or "auto", "", parallel)


def _logit_bias(bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    pairs: list[tuple[int, float]] = []
    for name, value in bias.items():
        if not (name.isascii() and name.isdigit() and len(name) <= _MAX_ID_DIGITS):
            raise RequestError(f"logit_bias: {name!r} is no token id", field="logit_bias")
        pairs.append((int(name), value))
    if len(dict(pairs)) < len(pairs):
        raise RequestError("logit_bias names one token id twice", field="logit_bias")
    return tuple(pairs)
