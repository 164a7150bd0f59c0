"""What models write: values with their schemas, and markup that is not quite right."""

import json
from typing import Any

SHARED = {
    "unit": {"enum": ["km", "mi"]},
    "place": {"type": "object", "properties": {"x": {"$ref": "#/$defs/place"}}},
}
ANY_VALUE = {
    "text": {"type": "string"},
    "maybe": {"type": ["string", "null"]},
    "either": {"anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]},
    "one": {"oneOf": [{"type": "array", "items": {"type": "string"}}, {"type": "boolean"}]},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "on": {"type": "boolean"},
    "list": {"type": "array"},
    "object": {"type": "object"},
    "unit": {"$ref": "#/$defs/unit"},
    "place": {"$ref": "#/$defs/place"},
    "own": {"$ref": "#/properties/maybe"},
    "word": {"enum": ["1", "2", "true", None]},
    "both": {"allOf": [{"$ref": "#/$defs/unit"}, {"description": "of length"}]},
    "nullable": {"type": "string", "nullable": True},
    "free": {},
}
SCHEMA: dict[str, Any] = {"type": "object", "properties": ANY_VALUE, "$defs": SHARED}
SCHEMAS: dict[str, dict[str, Any]] = {
    "f": SCHEMA,
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
    "get_time": {"type": "object", "properties": {}},
    "visit": {"type": "object", "properties": {"cities": {"type": "array"}}},
}

CALL = ("get_weather", {"city": "Zürich", "days": 2})
TIME = ("get_time", {})

VALUES: dict[str, dict[str, Any]] = {
    "a string that looks like a number": {"text": "8001"},
    "a string with zeros before it": {"text": "00420", "maybe": "007"},
    "a string that looks like a boolean": {"text": "true"},
    "a string that looks like null": {"text": "null"},
    "JSON in a string": {"text": '{"a": [1, "b"]}', "maybe": '["x"]'},
    "a string in quotes": {"text": '"quoted"'},
    "a string with quotes in it": {"text": 'He said "hi", and it\'s fine: {"a"}'},
    "several lines": {"text": "one\n\n  two\n", "maybe": "a\nb"},
    "white space around a string": {"text": "  x  "},
    "an empty string": {"text": "", "maybe": ""},
    "backslashes": {"text": "C:\\new\\table \\d+ \\u0041 \\\\"},
    "other scripts": {"text": "東京 \U0001f600 e\u0301 \u2028"},
    "tags in a string": {"text": "<b>x</b> </parameter> <parameter=z> & </function>"},
    "null of a union": {"maybe": None, "either": None, "own": None, "nullable": None},
    "a string of a union": {"maybe": "x", "either": "x", "own": "Oslo"},
    "a number of a union": {"either": 5},
    "a list or a boolean": {"one": ["a", "b"]},
    "a boolean or a list": {"one": True},
    "booleans": {"on": False},
    "numbers": {"count": -3, "ratio": 2.5},
    "a number with an exponent": {"ratio": 1e5},
    "a large integer": {"count": 123456789012345678901234567890},
    "a whole number that may have a point": {"ratio": 2},
    "lists and objects": {"list": [1, "2", None, {"a": True}], "object": {"a": {"b": [[]]}}},
    "empty ones": {"list": [], "object": {}},
    "references": {"unit": "km", "place": {"x": {"x": {}}}, "both": "mi"},
    "words that look like others": {"word": "1"},
    "the word true": {"word": "true"},
    "null among words": {"word": None},
    "no schema at all": {"free": {"a": 1}},
    "a property that the schema lacks": {"unknown": "x"},
    "deep nesting": {"object": json.loads('{"a":' * 60 + "1" + "}" * 60)},
}

BARE: dict[str, tuple[str, str, Any]] = {
    # case: (property, what the model writes, what it means)
    "Python's true": ("on", "True", True),
    "Python's false": ("one", "False", False),
    "Python's null": ("maybe", "None", None),
    "a whole number with an exponent": ("count", "1e5", 100000),
    "a whole number with a point": ("count", "5.0", 5),
    "a number without its zero": ("ratio", ".5", 0.5),
    "a number with a sign": ("count", "+3", 3),
    "Python's list": ("list", "['a', 1, None]", ["a", 1, None]),
    "Python's object": ("object", "{'a': \"it's\"}", {"a": "it's"}),
    "a bare word": ("text", "Oslo", "Oslo"),
    "a bare number for a string": ("text", "8001", "8001"),
    "bare zeros for a string": ("text", "007", "007"),
    "a version": ("maybe", "1.10", "1.10"),
    "a word of a list": ("unit", "km", "km"),
    "a quoted word of a list": ("unit", '"km"', "km"),
    "a number among words": ("word", "2", "2"),
}

WRITTEN: dict[str, tuple[str, str, Any]] = {
    # case: (tool, what the model writes for the arguments, what it means)
    "null": ("get_time", "null", {}),
    "an empty list": ("get_time", "[]", {}),
    "an empty string": ("get_time", '""', {}),
    "None": ("get_time", "None", {}),
    "a list of the arguments": ("get_weather", '["Zürich", 2]', {"city": "Zürich", "days": 2}),
    "a list of one object": ("get_weather", '[{"city": "Oslo"}]', {"city": "Oslo"}),
    "the list that the tool takes": ("visit", '["Oslo", "Rome"]', {"cities": ["Oslo", "Rome"]}),
    "a string with JSON in it": ("get_weather", '"{\\"city\\": \\"Z\\u00fcrich\\"}"', {"city": "Zürich"}),
    "a value alone": ("get_weather", '"Oslo"', {"city": "Oslo"}),
    "Python's object": (
        "get_weather",
        "{'city': 'Côte d\\'Or', 'days': None}",
        {"city": "Côte d'Or", "days": None},
    ),
    "a comma too many": ("get_weather", '{"city": "Oslo", "days": 2, }', {"city": "Oslo", "days": 2}),
    "line breaks in a string": ("get_weather", '{"city": "a\nb\tc"}', {"city": "a\nb\tc"}),
    "quotes in a string": ("get_weather", '{"city": "the "old" town"}', {"city": 'the "old" town'}),
    "escapes that JSON lacks": ("get_weather", '{"city": "\\d+ it\\\'s"}', {"city": "\\d+ it's"}),
    "names without quotes": ("get_weather", "{city: Oslo, days: 2}", {"city": "Oslo", "days": 2}),
    "a bracket that is not closed": ("visit", '{"cities": ["Oslo"}', {"cities": ["Oslo"]}),
    "escaped letters": ("get_weather", '{"city": "\\u6771\\ud83d\\ude00"}', {"city": "東😀"}),
    "much white space": (
        "get_weather",
        '{\n  "city" : "Oslo" ,\n  "days" :\n2\n}',
        {"city": "Oslo", "days": 2},
    ),
}

NOT_QUITE_RIGHT: list[tuple[str, str]] = [
        ("hermes", '<tool_call>{"name": "weather:mcp:get_weather", "arguments": {"city": "Zürich", "days": 2}}</tool_call>'),
        ("harmony", '<|channel|>commentary to=functions.functions.get_weather<|message|>{"city": "Zürich", "days": 2}<|call|>'),
        ("hermes", '{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>'),
        ("hermes", '{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}'),
        ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}}\n</tool_call>'),
        ("hermes", '<tool_call>\n```json\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}\n```\n</tool_call>'),
        ("hermes", '<tool_call>[{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}]</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_weather", "parameters": {"city": "Zürich", "days": 2}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"city": "Zürich", "days": 2}, "name": "get_weather"}</tool_call>'),
        ("hermes", "<tool_call>{'name': 'get_weather', 'arguments': {'city': 'Zürich', 'days': 2}}</tool_call>"),
        ("hermes", '<tool_call>{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "functions.get_weather", "arguments": {"city": "Zürich", "days": 2}, "id": 1}</tool_call>'),
        ("qwen3_coder", "<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n<parameter=days>\n2\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call><function=get_weather><parameter=city>Zürich</parameter><parameter=days>2</parameter></function></tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n2"),
        ("qwen3_coder", '<tool_call>\n<function=get_weather>\n{"city": "Zürich", "days": 2}\n</function>\n</tool_call>'),
        ("llama3_json", '```json\n{"name": "get_weather", "parameters": {"city": "Zürich", "days": 2}}\n```'),
        ("llama3_json", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Zürich", "days": 2}}'),
        ("llama3_json", '[{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}]'),
        ("llama3_json", '{"type": "function", "name": "get_weather", "parameters": {"city": "Zürich", "days": 2}}'),
        ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Zürich", "days": 2}'),
        ("pythonic", "get_weather(city='Zürich', days=2)"),
        ("pythonic", "[get_weather(city='Zürich', days=2)"),
        ("pythonic", "get_weather(city='Zürich', days=2)]"),
        ("mistral", '[{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}]'),
        ("mistral", '[TOOL_CALLS]{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}'),
        ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}'),
        ("mistral", '[TOOL_CALLS]get_weather{"city": "Zürich", "days": 2}'),
        ("mistral", 'get_weather[ARGS]{"city": "Zürich", "days": 2}'),
        ("mistral", '[TOOL_CALLS] ```json\n[{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}]\n```'),
        ("deepseek_v3", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n{"city": "Zürich", "days": 2}\n<｜tool▁call▁end｜>'),
        ("deepseek_v3", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>```json\n{"city": "Zürich", "days": 2}\n```'),
        ("deepseek_v3", '<｜tool▁call▁begin｜>functions.get_weather<｜tool▁sep｜>{"city": "Zürich", "days": 2}'),
        ("harmony", '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Zürich", "days": 2}'),
        ("harmony", '<|channel|>commentary to=get_weather <|constrain|>json<|message|>{"city": "Zürich", "days": 2}<|call|>'),
        ("harmony", ' to=functions.get_weather<|channel|>commentary json<|message|>\n{"city": "Zürich", "days": 2}\n<|end|>'),
        ("harmony", '<|channel|>analysis to=functions.get_weather code<|message|>{"city": "Zürich", "days": 2}<|call|>'),
    ]  # fmt: skip
"""A format, and a call of get_weather with Zürich and 2."""
