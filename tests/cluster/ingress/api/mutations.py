"""Valid bodies of every route, and everything that a mutator makes of them."""

import copy
import json
from collections.abc import Iterator
from typing import Any

from tests.cluster.ingress.api.fakes import NAME

_BIG = "@@BIG@@"
VALUES: list[Any] = [
    *(None, [], {}, "", 0, -1, True, False, 0.5, 2**63, 2**200, _BIG, "x", "\x00", "-1", "none"),
    *([[]], [None], [{}], [[[]]], {"type": []}, {"type": {}}, {"type": "text"}, [1, "x", None], {"": None}),
]
"""What is put in each place. `_BIG` becomes a number beyond all floats."""

_SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
_HINTS: Any = {"session": "s", "prefetch": 3}
_CACHED: Any = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
_CHAT_TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA, "strict": False}}
_CALL: Any = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_SAMPLING: Any = {
    "temperature": 1,
    "top_p": 0.9,
    "top_k": 3,
    "seed": 5,
    "stop": ["z"],
    "n": 1,
    "logit_bias": {"65": 1.0},
    "max_tokens": 3,
    "stream": True,
    "stream_options": {"include_usage": True},
    "cache_hints": _HINTS,
    "service_tier": "auto",
    "priority": 0,
    "metadata": {"a": "b"},
    "truncate_prompt_tokens": 50,
}

BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {
            **_SAMPLING,
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "x", **_CACHED}], "name": "n"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [_CALL],
                    "reasoning_details": [{"type": "reasoning.text", "text": "t"}],
                },
                {"role": "tool", "tool_call_id": "c", "content": "x"},
            ],
            "tools": [_CHAT_TOOL],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
                {"type": "function", "function": {"name": "f"}}]}},
            "reasoning_effort": "high",
            "chat_template_kwargs": {"a": 1},
        },
        {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2,
         "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}},
        {"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"choice": ["a", "b"]}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        {"messages": [{"role": "user", "content": "x"}], "use_beam_search": True, "n": 2, "length_penalty": 1.0},
    ],
    "/v1/completions": [
        {**_SAMPLING, "prompt": ["x", "y"]},
        {"prompt": [[65], [66]], "echo": True, "logprobs": 2, "prompt_logprobs": 1},
        {"prompt": [65], "best_of": 2, "n": 1, "logprobs": 0},
        {"prompt": "a", "suffix": "b", "bad_words": ["x"], "allowed_token_ids": [65], "stop_token_ids": [3]},
    ],
    "/v1/responses": [
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "y"}]},
            ],
            "instructions": "i",
            "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA}, {"type": "web_search"},
                      {"type": "namespace", "name": "s", "tools": [{"type": "function", "name": "g"}]}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["message.output_text.logprobs"],
            "metadata": {"a": "b"},
            "cache_hints": _HINTS,
            "top_k": 3,
            "stream": False,
        },
    ],
    "/v1/messages": [
        {
            "max_tokens": 3,
            "system": [{"type": "text", "text": "s", **_CACHED}],
            "messages": [
                {"role": "user", "content": [
                    {"type": "text", "text": "x"},
                    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}},
                    {"type": "document", "title": "t", "source": {"type": "content", "content": [
                        {"type": "text", "text": "x"}]}},
                    {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "x"}]},
                ]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "t", "signature": ""},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                ]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [
                    {"type": "text", "text": "x"}, {"type": "tool_reference", "tool_name": "f"}]}]},
            ],
            "tools": [{"name": "f", "input_schema": _SCHEMA, "input_examples": [{"a": "b"}], **_CACHED}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 5},
            "output_config": {"effort": "high"},
            "cache_hints": _HINTS,
            "stop_sequences": ["z"],
            "stream": True,
            "metadata": {"user_id": "u"},
            "context_management": {"edits": []},
            **_CACHED,
        },
    ],
    "/v1/embeddings": [{"input": ["x", "y"], "dimensions": 2, "encoding_format": "float", "user": "u"}],
    "/v1/rerank": [{"query": "q", "documents": ["x", {"text": "y"}], "top_n": 1, "return_documents": True}],
    "/v1/score": [{"text_1": "x", "text_2": ["y"]}],
    "/tokenize": [
        {"prompt": "x", "add_special_tokens": False},
        {"messages": [{"role": "user", "content": "x"}], "tools": [_CHAT_TOOL], "chat_template_kwargs": {}},
    ],
    "/detokenize": [{"tokens": [65, 66]}],
    "/v1/cache_hints": [{"session": "s", "action": "release"}],
    "/v1/load_lora_adapter": [{"lora_name": "a", "lora_path": "/none", "load_inplace": False}],
    "/v1/unload_lora_adapter": [{"lora_name": "a", "lora_int_id": 1}],
    "/v1/batches": [{"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"a": "b"}}],
}  # fmt: skip
BODIES["/infill"] = [
    {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "f", "text": "t"}], "prompt": "p", "n_predict": 3,
     "stop": ["z"], "seed": -1, "top_k": 3, "repeat_penalty": 1.0, "stream": True, "t_max_predict_ms": 5},
]  # fmt: skip
_OLLAMA: Any = {
    "options": {"num_predict": 3, "top_k": 3.0, "seed": -1, "stop": ["z"], "repeat_last_n": 4, "num_ctx": 50, "mirostat": 0},
    "keep_alive": "5m",
    "logprobs": True,
    "top_logprobs": 2,
    "think": "low",
}  # fmt: skip
BODIES["/api/chat"] = [
    {
        **_OLLAMA,
        "messages": [
            {"role": "user", "content": "x", "images": []},
            {"role": "assistant", "thinking": "t", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
            {"role": "tool", "content": "x", "tool_name": "f"},
        ],
        "tools": [_CHAT_TOOL],
        "cache_hints": _HINTS,
        "truncate": True,
    },
    {"messages": [{"role": "user", "content": "x"}], "format": _SCHEMA, "stream": False},
]  # fmt: skip
BODIES["/api/generate"] = [
    {**_OLLAMA, "prompt": "x", "system": "s", "context": [65, 66], "stream": False},
    {"prompt": "x", "suffix": "y"},
    {"prompt": "x", "raw": True, "format": "json"},
    {"prompt": "x", "images": ["eA=="]},
]
BODIES["/api/embed"] = [{"input": ["x", "y"], "truncate": True, "dimensions": 2, "keep_alive": -1}]
BODIES["/api/embeddings"] = [{"prompt": "x", "options": {"num_ctx": 5}}]
BODIES["/api/show"] = [{"name": NAME, "verbose": True}]
BODIES["/api/pull"] = [{"insecure": False, "stream": False}]
BODIES["/v1/conversations"] = [{"items": BODIES["/v1/responses"][0]["input"], "metadata": {"a": "b"}}]
BODIES["/v1/responses/compact"] = [{"input": BODIES["/v1/responses"][0]["input"], "instructions": "i"}]
BODIES["/v1/responses/input_tokens"] = BODIES["/v1/responses"]
BODIES["/v1/messages/count_tokens"] = [
    {
        name: value
        for name, value in BODIES["/v1/messages"][0].items()
        if name in ("messages", "tools", "system")
    }
]


def valid_bodies(route: str) -> list[dict[str, Any]]:
    """Return the bodies of a route. Each but those of sessions, adapters and batches names a model."""
    named = route not in (
        "/v1/cache_hints",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/batches",
    )
    return [{"model": NAME, **body} if named else body for body in BODIES[route]]


def mutated(body: dict[str, Any]) -> Iterator[bytes]:
    """Yield the body with each of its places replaced, left out, or written twice."""
    yield from map(encoded, VALUES)
    for path in paths(body):
        for value in VALUES:
            yield encoded(replaced(body, path, value))
        yield encoded(without(body, path))
    for name in body:
        twice = f'{{"{name}": {{}}, '.encode()
        yield twice + encoded(body)[1:]


def encoded(value: Any) -> bytes:
    return json.dumps(value).replace(f'"{_BIG}"', "1e400").encode()


def paths(value: Any) -> Iterator[tuple[Any, ...]]:
    inner: Any = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, child in inner:
        yield (key,)
        yield from ((key, *path) for path in paths(child))


def replaced(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    out = copy.deepcopy(body)
    _holder(out, path)[path[-1]] = value
    return out


def without(body: Any, path: tuple[Any, ...]) -> Any:
    out = copy.deepcopy(body)
    del _holder(out, path)[path[-1]]
    return out


def _holder(body: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        body = body[key]
    return body
