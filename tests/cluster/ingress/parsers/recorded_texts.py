"""What models of each family write, as their chat templates render the same calls into the next prompt."""

from dataclasses import dataclass, field

from cluster.ingress.parsers.model_formats import ModelFormats
from cluster.ingress.parsers.output_events import (
    CallArguments,
    CallBegins,
    CallEnds,
    OutputEvent,
    Reasoning,
    Text,
)

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
SCHEMAS = {"get_weather": WEATHER, "get_time": {"type": "object", "properties": {}}}


def call(index: int, name: str, arguments: str) -> list[OutputEvent]:
    return [CallBegins(index, name), CallArguments(index, arguments), CallEnds(index)]


@dataclass(frozen=True)
class Recorded:
    formats: ModelFormats
    text: str
    events: list[OutputEvent] = field(default_factory=list[OutputEvent])
    opened: bool = False


TWO_CALLS = [*call(0, "get_weather", '{"city": "Zürich", "days": 2}'), *call(1, "get_time", "{}")]
OF_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
OF_V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
ANALYSIS = "<|channel|>analysis<|message|>Which city?<|end|>"
RECORDED = {
    "qwen2.5": Recorded(
        ModelFormats("hermes", "none"),
        'I will look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        [Text("I will look."), *TWO_CALLS],
    ),
    "arguments before the name": Recorded(
        ModelFormats("hermes", "none"),
        '<tool_call>{"arguments": {"city": "a \\"}\\" b"}, "name": "get_weather"}</tool_call>',
        call(0, "get_weather", '{"city": "a \\"}\\" b"}'),
    ),
    "qwen3": Recorded(
        ModelFormats("hermes", "think"),
        '<think>\nThey want <b>weather</b>.\n</think>\n\n<tool_call>\n{"name": "get_weather", '
        '"arguments": {"city": "Zürich", "days": 2}}\n</tool_call>\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        [Reasoning("They want <b>weather</b>."), *TWO_CALLS],
    ),
    "qwen3 without thinking": Recorded(
        ModelFormats("hermes", "think"),
        "It is < 3 °C, <tool> or not.\n",
        [Text("It is < 3 °C, <tool> or not.\n")],
    ),
    "qwen3-coder": Recorded(
        ModelFormats("qwen3_coder", "none"),
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        TWO_CALLS,
    ),
    "llama 3 json": Recorded(
        ModelFormats("llama3_json", "none"),
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Zürich", "days": 2}}; {"name": "get_time", "parameters": {}}',
        TWO_CALLS,
    ),
    "llama 3 answers with an object": Recorded(
        ModelFormats("llama3_json", "none"),
        '{"name": "Ada", "parameters": {}}',
        [Text('{"name": "Ada", "parameters": {}}')],
    ),
    "llama pythonic": Recorded(
        ModelFormats("pythonic", "none"),
        "[get_weather(city='Zürich', days=2), get_time()]",
        TWO_CALLS,
    ),
    "llama pythonic with JSON's words": Recorded(
        ModelFormats("pythonic", "none"),
        '[get_weather(city={"names": ["a, (b", null], "near": true}, days=None)]',
        call(0, "get_weather", '{"city": {"names": ["a, (b", null], "near": true}, "days": null}'),
    ),
    "llama answers with a list": Recorded(
        ModelFormats("pythonic", "none"), "[1, 2] is a list", [Text("[1, 2] is a list")]
    ),
    "mistral": Recorded(
        ModelFormats("mistral", "none"),
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}, {"name": "get_time", "arguments": {}}]',
        TWO_CALLS,
    ),
    "mistral v11": Recorded(
        ModelFormats("mistral", "none"),
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich", "days": 2}[TOOL_CALLS]get_time[CALL_ID]abc123def[ARGS]{}',
        TWO_CALLS,
    ),
    "magistral": Recorded(
        ModelFormats("mistral", "mistral"),
        "[THINK]Hm.[/THINK]Done.",
        [Reasoning("Hm."), Text("Done.")],
    ),
    "deepseek-v3": Recorded(
        ModelFormats("deepseek_v3", "none"),
        "<｜tool▁calls▁begin｜>"
        + OF_V3.format("get_weather", '{"city": "Zürich", "days": 2}')
        + "\n"
        + OF_V3.format("get_time", "{}")
        + "<｜tool▁calls▁end｜>",
        TWO_CALLS,
    ),
    "deepseek-v3.1": Recorded(
        ModelFormats("deepseek_v3", "think"),
        "They want it.</think>I look.<｜tool▁calls▁begin｜>"
        + OF_V31.format("get_weather", '{"city": "Zürich", "days": 2}')
        + OF_V31.format("get_time", "{}")
        + "<｜tool▁calls▁end｜>",
        [Reasoning("They want it."), Text("I look."), *TWO_CALLS],
        opened=True,
    ),
    "deepseek-r1": Recorded(
        ModelFormats("deepseek_v3", "think"),
        "Okay.\n\nHm </thin\n</think>\n\nYes.",
        [Reasoning("Okay.\n\nHm </thin"), Text("Yes.")],
        opened=True,
    ),
    "gpt-oss": Recorded(
        ModelFormats("harmony", "harmony"),
        ANALYSIS + "<|start|>assistant<|channel|>final<|message|>It is 3 < 4 °C.",
        [Reasoning("Which city?"), Text("It is 3 < 4 °C.")],
    ),
    "gpt-oss call": Recorded(
        ModelFormats("harmony", "harmony"),
        ANALYSIS
        + "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Zürich", "days": 2}',
        [Reasoning("Which city?"), *TWO_CALLS[:3]],
    ),
    "gpt-oss call named before its channel": Recorded(
        ModelFormats("harmony", "harmony"),
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Zürich", "days": 2}<|call|>',
        TWO_CALLS[:3],
    ),
}
