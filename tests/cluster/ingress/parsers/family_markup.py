"""How the models of each family write a call with given arguments, and the same with what models get wrong."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.config.answer_formats import ToolFormat

NAMED = '{"name": "{name}", "arguments": {arguments}}'
DSML = '<｜DSML｜invoke name="{name}">\n{arguments}</｜DSML｜invoke>'
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"


TAGS: Mapping[ToolFormat, tuple[str, str, str]] = {
    "qwen3_coder": ("<parameter=", ">\n", "\n</parameter>\n"),
    "seed_oss": ("<parameter=", ">", "</parameter>\n"),
    "minimax_m2": ('<parameter name="', '">', "</parameter>\n"),
    "glm45": ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    "hy_v3": ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    "hy_v3_open": (
        "<arg_key:opensource>",
        "</arg_key:opensource>\n<arg_value:opensource>",
        "</arg_value:opensource>\n",
    ),
}
"""By format: what stands before an argument's name, between it and its value, and behind that."""


@dataclass(frozen=True)
class Markup:
    """`{name}` and `{arguments}` stand for a call's."""

    tools: ToolFormat
    call: str
    opening: str = ""
    between: str = ""
    closing: str = ""
    one_call: bool = False
    """A turn has one call, and text comes before it."""

    def write(self, *calls: tuple[str, Any]) -> str:
        return self.wrap(*(self.one(name, arguments) for name, arguments in calls))

    def wrap(self, *calls: str) -> str:
        return self.opening + self.between.join(calls) + self.closing

    def one(self, name: str, arguments: Any) -> str:
        """Return a call. `arguments`: an object, or text as the model writes it."""
        text = arguments if isinstance(arguments, str) else self.arguments(arguments)
        return self.call.replace("{name}", name).replace("{arguments}", text)

    def arguments(self, values: Mapping[str, Any]) -> str:
        match self.tools:
            case "qwen3_coder" | "seed_oss" | "minimax_m2" | "glm45" | "hy_v3" | "hy_v3_open":
                before, between, after = TAGS[self.tools]
                return "".join(
                    f"{before}{key}{between}{_bare(value)}{after}" for key, value in values.items()
                )
            case "deepseek_v32" | "deepseek_v4":
                return "".join(
                    f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
                    f"{_bare(value)}</｜DSML｜parameter>\n"
                    for key, value in values.items()
                )
            case "gemma4":
                return _gemma(values)[1:-1]
            case "pythonic" | "lfm2" | "olmo3":
                return ", ".join(f"{key}={value!r}" for key, value in values.items())
            case _:
                return json.dumps(values, ensure_ascii=False)


def _gemma(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case list():
            return f"[{','.join(map(_gemma, value))}]"  # type: ignore[reportUnknownArgumentType]
        case dict():
            return f"{{{','.join(f'{key}:{_gemma(each)}' for key, each in value.items())}}}"  # type: ignore[reportUnknownVariableType]
        case _:
            return json.dumps(value)


def _bare(value: Any) -> str:
    """As the model's template has it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


MARKUPS: Mapping[str, Markup] = {
    "hermes": Markup(
        "hermes", '<tool_call>\n{"name": "{name}", "arguments": {arguments}}\n</tool_call>', between="\n"
    ),
    "qwen3_coder": Markup(
        "qwen3_coder", "<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>", between="\n"
    ),
    "seed_oss": Markup(
        "seed_oss",
        "<seed:tool_call>\n<function={name}>\n{arguments}</function>\n</seed:tool_call>",
        between="\n",
    ),
    "minimax_m2": Markup(
        "minimax_m2",
        '<invoke name="{name}">\n{arguments}</invoke>',
        "<minimax:tool_call>\n",
        "\n",
        "\n</minimax:tool_call>",
    ),
    "glm45": Markup("glm45", "<tool_call>{name}\n{arguments}</tool_call>", between="\n"),
    "hy_v3": Markup(
        "hy_v3",
        "<tool_call>{name}<tool_sep>\n{arguments}</tool_call>",
        "<tool_calls>\n",
        "\n",
        "\n</tool_calls>",
    ),
    "hunyuan": Markup(
        "hunyuan",
        "<tool_call>{name}\n```json\n{arguments}\n```</tool_call>",
        "<tool_calls>",
        "\n",
        "</tool_calls>",
    ),
    "kimi_k2": Markup(
        "kimi_k2",
        "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "",
        "<|tool_calls_section_end|>",
    ),
    "deepseek_v32": Markup(
        "deepseek_v32", DSML, "<｜DSML｜function_calls>\n", "\n", "\n</｜DSML｜function_calls>"
    ),
    "deepseek_v4": Markup("deepseek_v4", DSML, "<｜DSML｜tool_calls>\n", "\n", "\n</｜DSML｜tool_calls>"),
    "apertus": Markup("apertus", '{"{name}": {arguments}}', "<|tools_prefix|>[", ", ", "]<|tools_suffix|>"),
    "hy_v3_open": Markup(
        "hy_v3_open",
        "<tool_call:opensource>{name}<tool_sep:opensource>\n{arguments}</tool_call:opensource>",
        "<tool_calls:opensource>\n",
        "\n",
        "\n</tool_calls:opensource>",
    ),
    "gemma4": Markup("gemma4", "<|tool_call>call:{name}{{arguments}}<tool_call|>"),
    "cohere": Markup(
        "cohere",
        '    {"tool_call_id": "0", "tool_name": "{name}", "parameters": {arguments}}',
        "<|START_ACTION|>[\n",
        ",\n",
        "\n]<|END_ACTION|>",
    ),
    "jamba": Markup("jamba", NAMED, "<tool_calls>[", ", ", "]</tool_calls>"),
    "phi4_mini_json": Markup("phi4_mini_json", NAMED, "<|tool_call|>[", ", ", "]<|/tool_call|>"),
    "granite": Markup("granite", NAMED, "<|tool_call|>[", ", ", "]"),
    "nemotron": Markup("nemotron", NAMED, "<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    "internlm": Markup(
        "internlm",
        '<|action_start|><|plugin|>\n{"name": "{name}", "parameters": {arguments}}<|action_end|>',
        between="\n",
    ),
    "lfm2": Markup("lfm2", "{name}({arguments})", "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    "olmo3": Markup("olmo3", "{name}({arguments})", "<function_calls>\n", "\n", "\n</function_calls>"),
    "llama3_json": Markup("llama3_json", '{"name": "{name}", "parameters": {arguments}}', between="; "),
    "pythonic": Markup("pythonic", "{name}({arguments})", "[", ", ", "]"),
    "mistral": Markup("mistral", '{"name": "{name}", "arguments": {arguments}}', "[TOOL_CALLS][", ", ", "]"),
    "mistral v11": Markup("mistral", "[TOOL_CALLS]{name}[ARGS]{arguments}"),
    "deepseek_v3": Markup(
        "deepseek_v3",
        V3.format("{name}", "{arguments}"),
        "<｜tool▁calls▁begin｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": Markup(
        "deepseek_v3",
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "",
        "<｜tool▁calls▁end｜>",
    ),
    "harmony": Markup(
        "harmony",
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>",
        between="<|start|>assistant",
        one_call=True,
    ),
}
